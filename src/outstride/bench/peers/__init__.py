"""Other engines on the same machine: one file for each engine, and the comparisons.

`python -m outstride.bench.peers` prints the CMake options to build llama.cpp with on this machine.
"""
