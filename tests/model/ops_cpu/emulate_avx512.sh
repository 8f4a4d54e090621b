#!/bin/sh
# Runs the tests of the CPU kernels against their AVX-512 form on a processor that has AVX2 only, through SIMDe (libsimde-dev):
# proves the wide source, not its speed; then those of linear layers against the form for AVX512-VNNI.
# Usage: emulate_avx512.sh PYTHON [pytest arguments]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../../.."
python=$1
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
build() {
  for source in model/ops/cpp/*.cpp; do
    "${CXX:-g++}" -std=c++17 -O2 -fPIC -pthread -mavx2 -mfma -mf16c -ffp-contract=off -fno-math-errno -Wno-psabi "$@" \
      -include "$here/emulate_avx512.h" -c "$source" -o "$folder/$(basename "$source").o"
  done
  "${CXX:-g++}" -shared "$folder"/*.o -pthread -o "$folder/kernels.so"
}
build
GEMSERVE_CPU_KERNELS="$folder/kernels.so" "$python" -m pytest -q -p no:cacheprovider tests/model/ops_cpu \
  --deselect tests/model/ops_cpu/test_build.py "$@"
build -DGEMSERVE_EMULATE_VNNI
tests=tests/model/ops_cpu
GEMSERVE_CPU_KERNELS="$folder/kernels.so" "$python" -m pytest -q -p no:cacheprovider \
  "$tests/test_linear.py" "$tests/test_few_bits.py" "$tests/test_greedy.py" "$@"
