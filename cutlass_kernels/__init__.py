"""Kernels written in CuTe DSL, CUTLASS's Python language.

Importing the package needs nothing but Python; a kernel module imports ``cutlass`` when it
is asked to build.
"""
