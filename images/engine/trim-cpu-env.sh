#!/bin/sh
# Removes from an environment what vLLM's CPU build never loads: plain torch brings the libraries of a GPU, of which only
# those that its own libraries are linked with are needed to import it.
# Usage: trim-cpu-env.sh ENVIRONMENT
set -eu
packages=$(echo "$1"/lib/python3.*/site-packages)
test -d "$packages/torch"

# Triton has no backend for the CPU; vLLM says so and goes on without it.
rm -rf "$packages"/triton "$packages"/triton-*.dist-info

# cuDNN's front library is linked; its engines are opened at the first convolution on a GPU.
find "$packages/nvidia/cudnn/lib" -name 'libcudnn_*.so*' -delete

for unused in libnvrtc.alt libcusolverMg libnvperf libnvblas; do
  find "$packages/nvidia" -name "$unused*" -delete
done
find "$packages/nvidia" "$packages/torch" \( -name '*.a' -o -name '*.bc' \) -delete
find "$packages/nvidia" -type d -name include -prune -exec rm -rf {} +
rm -rf "$packages/torch/include" "$packages/torch/test"
