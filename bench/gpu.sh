#!/usr/bin/env bash
# All that a GPU is to show, in one command that ends within nine minutes and needs no network:
#
#   bench/gpu.sh                    install, prove, bench, report
#   bench/gpu.sh install variants   those stages alone; their names are below
#   BENCH_COMMIT=abc1234 bench/gpu.sh    says what is measured, in a copy without its history
#   DEVICE=cpu TESTS=tests/unet BENCHES=bench/test_machine.py bench/gpu.sh    rehearses it without a GPU
#
# install   the package, by the packages that are here
# prove     at once, since nothing is timed: the tests, compute-sanitizer over the small ones, and the first step of all
#           that the benches time, which fills the compilers' caches
# bench     the goals' cases, alone on the machine, in one process; JSON to bench/results/<gpu>/
# more      the benches' other cases (pytest bench/ -m slow)
# variants  launch constants against each other
# report    what was measured, beside the goals
#
# Logs are in bench/out/gpu/.  Exits with 1 if a stage failed or ran out of its time.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

device=${DEVICE:-cuda}
python=${PYTHON:-python3}
read -ra tests <<<"${TESTS:-tests}"
# the most important first, should time run out
read -ra benches <<<"${BENCHES:-$(printf 'bench/test_%s.py ' machine inplace_abn inplace_norm_act max_pool conv_abn \
  unet convert launch norm_act)}"
stages=("${@:-install prove bench report}")
read -ra stages <<<"${stages[*]}"
# seconds: nine minutes in all
declare -A limits=([install]=20 [prove]=245 [bench]=250 [more]=500 [variants]=400 [report]=15)
logs=bench/out/gpu
mkdir -p "$logs"

# nothing of the caller's may decide how kernels run
unset FUSEDSEG_BACKEND TRITON_INTERPRET

outcomes=()
failed=()

# run STAGE NAME COMMAND...: a log, the stage's limit, an outcome
run() {
  local limit=${limits[$1]} name=$2 began=$SECONDS code=0
  shift 2
  timeout --signal=INT --kill-after=15 "$limit" "$@" >"$logs/$name.log" 2>&1 || code=$?
  local state=passed
  ((code == 0)) || state="failed ($code)"
  # pytest that was interrupted ends with 2
  ((SECONDS - began < limit)) || state="out of time"
  echo "$name: $state, $((SECONDS - began)) s" | tee "$logs/$name.outcome"
}

settle() {
  local name
  for name in "$@"; do
    outcomes+=("$(<"$logs/$name.outcome")")
    [[ $(<"$logs/$name.outcome") == *": passed"* ]] || failed+=("$name")
  done
}

# sanitize TOOL: tests marked so, whose tensors lie in allocations of their own
sanitize() {
  local tool
  tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer) || return
  # errors of the driver's own functions are PyTorch's questions, such as whether a pointer is of the device
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 run prove "$1" "$tool" --tool "$1" --error-exitcode 9 --report-api-errors no \
    "$python" -m pytest tests -m sanitize --device cuda -q -p no:cacheprovider
}

prove() {
  local workers=() names=(tests) name
  if "$python" -c "import xdist" 2>/dev/null; then
    workers=(-n "$(($(nproc) > 4 ? $(nproc) - 4 : 2))" --dist worksteal)
  fi
  run prove tests "$python" -m pytest "${tests[@]}" --device "$device" -q -rfE --tb=short "${workers[@]}" &
  for bench in "${benches[@]}"; do
    name=rehearsal-$(basename "$bench" .py)
    names+=("$name")
    # the tests, which take longest, go first
    TORCHINDUCTOR_COMPILE_THREADS=4 run prove "$name" nice "$python" -m pytest "$bench" --device "$device" --rehearse \
      -q -p no:cacheprovider &
  done
  if [[ $device == cuda ]]; then
    names+=(memcheck racecheck)
    rm -f "$logs"/{mem,race}check.outcome
    for name in memcheck racecheck; do
      (sanitize $name || echo "$name: failed: compute-sanitizer is not here" | tee "$logs/$name.outcome") &
    done
  fi
  wait
  settle "${names[@]}"
}

for stage in "${stages[@]}"; do
  case $stage in
    install) run install install "$python" -m pip install --no-deps --no-build-isolation -e . ; settle install ;;
    prove) prove ;;
    bench) run bench bench "$python" -m pytest "${benches[@]}" --device "$device" -q -rfE ; settle bench ;;
    more) run more more "$python" -m pytest bench -m slow --device "$device" -q -rfE ; settle more ;;
    variants) run variants variants "$python" -m pytest bench -m variants --device "$device" -q -rfE ; settle variants ;;
    report)
      results=$("$python" -c "import torch; from bench.results import default_directory
print(default_directory(torch.device('$device')))") &&
        run report report "$python" -m bench.report "$results"
      settle report
      ;;
    *) echo "bench/gpu.sh: no stage '$stage'; there are install, prove, bench, more, variants and report" >&2 && exit 2 ;;
  esac
done

for name in "${failed[@]}"; do
  printf '\n== %s, the end of its log\n' "$name"
  tail -n 40 "$logs/$name.log"
done
for name in bench variants more report; do
  if [[ " ${stages[*]} " == *" $name "* && -f $logs/$name.log && " ${failed[*]} " != *" $name "* ]]; then
    printf '\n== %s\n' "$name"
    tail -n 80 "$logs/$name.log"
  fi
done
printf '\n'; printf '%s\n' "== outcomes after $SECONDS s" "${outcomes[@]}"
((${#failed[@]} == 0))
