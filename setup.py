"""Builds the native kernels, and what the host does between passes, with the machine's compiler.

Both are optional: without a compiler the package installs all the same, passes run on torch, and
Python does the rest.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "outstride.ops.cpu._kernels",
            sources=["src/outstride/ops/cpu/kernels.cpp"],
            depends=[
                "src/outstride/core/noise.h",
                "src/outstride/ops/cpu/kernels.inc",
                "src/outstride/ops/cpu/kernels.adapter.inc",
                "src/outstride/ops/cpu/kernels.attention.inc",
                "src/outstride/ops/cpu/kernels.attention.amx.inc",
                "src/outstride/ops/cpu/kernels.attention.blocks.inc",
                "src/outstride/ops/cpu/kernels.attention.lanes.inc",
                "src/outstride/ops/cpu/kernels.attention.products.inc",
                "src/outstride/ops/cpu/kernels.attention.softmax.inc",
                "src/outstride/ops/cpu/kernels.avxvnni.inc",
                "src/outstride/ops/cpu/kernels.bytes.inc",
                "src/outstride/ops/cpu/kernels.cache.inc",
                "src/outstride/ops/cpu/kernels.experts.inc",
                "src/outstride/ops/cpu/kernels.features.inc",
                "src/outstride/ops/cpu/kernels.int4.inc",
                "src/outstride/ops/cpu/kernels.hadamard.inc",
                "src/outstride/ops/cpu/kernels.lanes.inc",
                "src/outstride/ops/cpu/kernels.neon.inc",
                "src/outstride/ops/cpu/kernels.pack.inc",
                "src/outstride/ops/cpu/kernels.recurrent.inc",
            ],
            extra_compile_args=[
                "-O3",
                "-fno-wrapv",  # Python's own builds have it on, which costs wide loops half their speed
                "-std=c++17",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-Wno-psabi",
            ],
            extra_link_args=["-lpthread"],
            language="c++",
            optional=True,
        ),
        Extension(
            "outstride.core._host",
            sources=["src/outstride/core/host.cpp"],
            depends=["src/outstride/core/noise.h"],
            extra_compile_args=[
                "-O3",
                "-fno-wrapv",
                "-std=c++17",
                "-ffp-contract=off",
                "-fno-math-errno",
            ],
            language="c++",
            optional=True,
        ),
    ]
)
