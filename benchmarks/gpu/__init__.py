"""Runs everything that differs between CUDA and the CPU, and writes the results to docs/gpu.md: `make gpu-report`."""
