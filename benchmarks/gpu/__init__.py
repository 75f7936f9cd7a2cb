"""Run everything that CUDA does otherwise than the CPU, and write what came out to docs/gpu.md: `make gpu-report`."""
