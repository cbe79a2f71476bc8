"""Loops of the kernels: every item once, by PyTorch's threads where there is OpenMP and by threads of their own elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvq_ops.cpu import build

PROGRAM = """
#include <sys/wait.h>
#include <unistd.h>
#include <cstdio>
#include <set>
#include <vector>
#include "parallel.h"

static bool every_item_once(int64_t items, int64_t threads) {
  std::vector<std::atomic<int>> seen(items);
  kvq::parallel(items, threads, [&](int64_t i) { seen[i].fetch_add(1); });
  for (auto& x : seen) if (x != 1) return false;
  return true;
}

static int threads_of(int64_t items, int64_t threads) {
  std::mutex lock;
  std::set<std::thread::id> found;
  kvq::parallel(items, threads, [&](int64_t) {
    std::lock_guard<std::mutex> guard(lock);
    found.insert(std::this_thread::get_id());
  });
  return int(found.size());
}

int main() {
  for (int64_t items : {0, 1, 2, 3, 7, 100, 1000})
    for (int64_t threads : {1, 2, 3, 8})
      if (!every_item_once(items, threads)) return std::printf("items %ld threads %ld\\n", long(items), long(threads)), 1;
  bool nested = true;
  kvq::parallel(4, 2, [&](int64_t) { nested = nested && every_item_once(5, 2); });
  if (!nested) return std::puts("nested"), 1;
  if (threads_of(100, 1) != 1) return std::puts("one thread"), 1;
  const bool openmp = kvq::openmp() != nullptr;
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a loop that waits for threads of the parent would never end
    _exit(kvq::openmp() == nullptr && every_item_once(50, 3) ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0) return std::printf("child: %d\\n", status), 1;
  std::puts(openmp ? "openmp" : "own");
  return 0;
}
"""


@pytest.mark.parametrize("flags", [(), ("-fopenmp",)], ids=["own", "openmp"])
def test_every_item_once_and_in_forked_children(tmp_path: Path, flags: tuple[str, ...]) -> None:
    source, program = tmp_path / "loops.cpp", tmp_path / "loops"
    source.write_text(PROGRAM)
    # What nothing refers to is kept, or there would be no runtime in the process.
    kept = ("-Wl,--no-as-needed",) if flags else ()
    command = [*build._compiler(), "-std=c++17", "-O1", "-pthread", *kept, *flags, f"-I{build.SOURCES}"]
    subprocess.run([*command, str(source), "-o", str(program), "-ldl"], check=True, timeout=120)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["openmp" if flags else "own"]), done.stdout
