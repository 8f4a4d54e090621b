#!/bin/sh
# Runs the tests of the CPU kernels against a build with the address and undefined-behaviour sanitizers: an access outside a
# tensor, a misaligned or overflowing operation ends the run. Usage: sanitize.sh PYTHON [pytest arguments]
set -eu
cd "$(dirname "$0")/../../../.."
python=$1
shift
compiler=${CXX:-g++}
# The sanitizers' runtimes must come first in a process that was not built with them. Python and torch keep memory until the
# process ends, so leaks are not asked for; CPython's own allocator would hide overruns, hence malloc.
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so) $("$compiler" -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  PYTHONMALLOC=malloc GEMSERVE_SANITIZE=1 \
  exec "$python" -m pytest -q -p no:cacheprovider tests/model/ops/cpu "$@"
