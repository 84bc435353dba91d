"""Other engines on the same machine: one file for each, and what is compared with them.

`python -m outstride.bench.peers` prints the CMake options to build llama.cpp with on this machine.
"""
