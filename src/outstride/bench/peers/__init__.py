"""Other engines on the same machine: one file for each engine, and the comparisons.

`python -m outstride.bench.peers` prints the CMake options to build llama.cpp with on this machine,
with `avx2` as an argument those of a build for AVX2.
"""
