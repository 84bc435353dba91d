"""Builds the native kernels with the machine's compiler.

They are optional: without a compiler the package installs all the same and passes run on torch.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "outstride.ops.cpu._kernels",
            sources=["src/outstride/ops/cpu/kernels.cpp"],
            depends=[
                "src/outstride/ops/cpu/kernels.inc",
                "src/outstride/ops/cpu/kernels.adapter.inc",
                "src/outstride/ops/cpu/kernels.attention.inc",
                "src/outstride/ops/cpu/kernels.groups.inc",
            ],
            extra_compile_args=[
                "-O3",
                "-std=c++17",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-Wno-psabi",
            ],
            extra_link_args=["-lpthread"],
            language="c++",
            optional=True,
        )
    ]
)
