"""Run everything that differs between CUDA and the CPU, and write the results to docs/gpu.md: `make gpu-report`."""
