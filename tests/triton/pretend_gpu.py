"""A GPU for the compilers of torch and Triton where there is none: everything is compiled, nothing can run.

``pretend(capability)`` must come before tensors on ``cuda`` are made (fake ones: ``FakeTensorMode``). It gives torch a device
guard that does nothing, properties of a device, and gives Triton a driver that only knows its target. For one-way processes
of tests only: nothing is ever put back.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void pretend_cuda() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
"""


class Driver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def properties(capability: int) -> SimpleNamespace:
    major, minor = divmod(capability, 10)
    return SimpleNamespace(
        name=f"pretended sm_{capability}",
        major=major,
        minor=minor,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
        total_memory=80 * 2**30,
        gcnArchName="",
    )


def pretend(capability: int = 90) -> None:
    """Make fake tensors on ``cuda`` traceable and compilable for ``sm_<capability>``."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    _load_guard()
    driver.set_active(Driver(GPUTarget("cuda", capability, 32)))
    given = properties(capability)
    for name, value in {
        "get_device_properties": lambda device=None: given,
        "get_device_capability": lambda device=None: (given.major, given.minor),
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_: True,
    }.items():
        setattr(torch.cuda, name, value)
    _patch_interface(given)


def _patch_interface(given: Any) -> None:
    from torch._dynamo import device_interface

    interface = device_interface.CudaInterface
    for name, value in {
        "get_device_properties": lambda device=None: given,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_: True,
        "is_available": lambda: True,
        "get_raw_stream": lambda device=0: 0,
    }.items():
        setattr(interface, name, staticmethod(value))
    interface.Worker.get_device_properties = staticmethod(lambda device=None: given)  # type: ignore[method-assign]
    interface.Worker.current_device = staticmethod(lambda: 0)  # type: ignore[method-assign]


@functools.cache
def _load_guard() -> None:
    """Calls on fake CUDA tensors from Python ask for a device guard, which a torch without CUDA does not have."""
    if torch.backends.cuda.is_built():
        return
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler to build a device guard with")
    package = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD)
        subprocess.run(
            [
                *(compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{package / 'include'}"),
                *(str(source), "-o", str(library), f"-L{package / 'lib'}", "-lc10"),
            ],
            check=True,
            capture_output=True,
        )
        ctypes.CDLL(str(library)).pretend_cuda()


class Generated:
    """What Inductor writes from now on: whole files, and each kernel in them."""

    def __init__(self) -> None:
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.graph import GraphLowering
        from torch._inductor.runtime import triton_helpers

        self.files: list[str] = []
        self.kernels: list[tuple[str, str]] = []

        def triton(_: Any, name: str, source: str, device_str: str = "cuda") -> None:
            self.kernels.append((name, source))

        GraphLowering.save_output_code = staticmethod(self.files.append)  # type: ignore[method-assign]
        AsyncCompile.triton = triton  # type: ignore[method-assign,assignment]
        torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
        triton_helpers.set_driver_to_gpu = lambda: None
        # Whether padding pays is measured on the device.
        config.shape_padding = False

    def call(self) -> str:
        """The lines of the last file that launch kernels and call operators."""
        lines = self.files[-1].splitlines()
        wanted = (".run(", "extern_kernels.", "torch.ops.", "aten.")
        return "\n".join(
            re.sub(r"reinterpret_tensor\((\w+), [^)]*\), [^)]*\), \d+\)", r"\1", line.strip())
            for line in lines
            if any(part in line for part in wanted) and not line.lstrip().startswith(("#", "def ", "import "))
        )

    def compile(self) -> dict[str, int]:
        """Compile every kernel as Inductor would, to the end; for each name how many variants that gives."""
        from torch._inductor.codecache import PyCodeCache

        found: dict[str, int] = {}
        for name, source in self.kernels:
            kernel = getattr(PyCodeCache.load(source), name)
            kernel.precompile(warm_cache_only=True)
            found[name] = len(kernel.compile_results)
        return found


class _Enough(Exception):
    """Everything was written that can be without a GPU's libraries."""


def packaged(program: torch.export.ExportedProgram) -> str:
    """The C++ that AOTInductor writes for a program on a GPU; each kernel in it has been compiled to a cubin.

    AOTInductor runs kernels while it compiles, to choose among configurations. Here each is compiled and registered as if it
    had run; nothing else is changed up to where the C++ would be compiled against CUDA's libraries.
    """
    from torch._inductor.codecache import AotCodeCompiler
    from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    written: list[str] = []

    def stop(cls: Any, *args: Any, **kwargs: Any) -> None:
        written.extend(value for value in (*args, *kwargs.values()) if isinstance(value, str))
        raise _Enough

    AotCodeCompiler.compile = classmethod(stop)  # type: ignore[method-assign,assignment]
    for wrapper in (PythonWrapperCodegen, CppWrapperGpu):
        wrapper.generate_and_run_autotune_block = _register_kernels  # type: ignore[method-assign]
    Generated()
    try:
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=os.path.join(tempfile.gettempdir(), "never.pt2"),
            inductor_configs={
                "triton.autotune_at_compile_time": True,
                "use_static_triton_launcher": False,
            },
        )
    except Exception as error:
        if not written:
            raise RuntimeError("AOTInductor did not come to writing C++") from error
    return next(text for text in written if "launchKernel" in text)


def _register_kernels(wrapper: Any) -> None:
    from torch._inductor.codecache import CudaKernelParamCache, PyCodeCache

    sources = re.findall(
        r"^\w+ = async_compile\.triton\('\w+', '''\n(.*?)'''",
        wrapper.kernel_autotune_defs.getvalue(),
        re.S | re.M,
    )
    for quoted in sources:
        source = ast.literal_eval(f"'''{quoted}'''")
        made = re.findall(r"^def (\w+)\(", source, re.M)[-1]
        name = re.search(r"'kernel_name': '(\w+)'", source)
        assert name is not None
        module = PyCodeCache.load(source)
        kernel = next(
            value
            for key in (re.sub(r"_\d+$", "", name[1]), name[1], made)
            if (value := getattr(module, key, None)) is not None
        )
        kernel.precompile(warm_cache_only=True)
        (result, *_), arguments = kernel.compile_results, kernel.fn.arg_names
        chosen, binary = result.config, result.kernel
        constants = {*kernel.triton_meta["constants"], *chosen.kwargs}
        constexprs = {param.name for param in kernel.fn.params if param.is_constexpr}
        CudaKernelParamCache.set(
            name[1],
            {
                "mangled_name": binary.metadata.name,
                "num_warps": binary.metadata.num_warps,
                "shared_mem": binary.metadata.shared,
                "stream": "stream",
                "config": {**chosen.kwargs, "num_warps": chosen.num_warps, "num_stages": chosen.num_stages},
                "inductor_meta": kernel.inductor_meta,
                "triton_meta": kernel.triton_meta,
                "def_args": [
                    *(argument for argument in arguments if argument not in {*chosen.kwargs, *constexprs}),
                    *kernel.inductor_meta.get("extra_launcher_args", []),
                ],
                "call_args": [argument for argument in arguments if argument not in constants],
                "global_scratch": None,
                "profile_scratch": None,
            },
            binary.asm["cubin"],
            "cubin",
        )
