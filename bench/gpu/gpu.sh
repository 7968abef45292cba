#!/usr/bin/env bash
# Installs, tests and benches the package on a GPU, in one command that ends within eleven minutes and needs no network:
#
#   bench/gpu/gpu.sh                    install, doctor, suite, prove, bench, report
#   bench/gpu/gpu.sh install more       only the named stages, which are listed below
#   BENCH_COMMIT=abc1234 bench/gpu/gpu.sh    names the commit in a copy without git history
#   DEVICE=cpu TESTS="tests/gpu/test_training.py tests/unet" BENCHES=bench/gpu/test_machine.py bench/gpu/gpu.sh
#                                       rehearses it without a GPU
#
# install   installs the package, without its dependencies
# doctor    tests every family of kernels, which says in a minute whether the rest is worth its time
# suite     runs the tests that a GPU needs first (pytest tests -m gpu): which paths, codegens and dtypes are right
# prove     runs at the same time the other tests, compute-sanitizer over the small tests, and the first step of every bench,
#           which fills the compilers' caches; nothing is timed
# bench     times the cases of the goals in one process, alone on the machine; writes JSON to bench/results/<gpu>/
# steps     measures whole training steps of networks at full size, in ten minutes
# more      times the other cases of the benches (pytest bench/ -m slow)
# report    prints the measured figures beside the goals
#
# Logs are in bench/out/gpu/.  Exits with 1 if a stage failed or ran out of its time.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

device=${DEVICE:-cuda}
python=${PYTHON:-python3}
read -ra tests <<<"${TESTS:-tests}"
# The most important benches come first, because time may run out.
read -ra benches <<<"${BENCHES:-bench/gpu/test_machine.py $(printf 'bench/test_%s.py ' norm_act max_pool concat conv3d conv_abn unet)}"
stages=("${@:-install doctor suite prove bench report}")
read -ra stages <<<"${stages[*]}"
# Limits in seconds; the default stages take eleven minutes together.
declare -A limits=([install]=20 [doctor]=70 [suite]=215 [prove]=215 [bench]=220 [steps]=630 [more]=500 [report]=15)
logs=bench/out/gpu
mkdir -p "$logs"

# The caller's settings must not decide how kernels run.
unset FUSEDSEG_BACKEND FUSEDSEG_SELF_TEST TRITON_INTERPRET

outcomes=()
failed=()

# run STAGE NAME COMMAND...: runs a command within the limit of its stage, and writes its log and its outcome
run() {
  local limit=${limits[$1]} name=$2 began=$SECONDS code=0
  shift 2
  timeout --signal=INT --kill-after=15 "$limit" "$@" >"$logs/$name.log" 2>&1 || code=$?
  local state=passed
  ((code == 0)) || state="failed ($code)"
  # An interrupted pytest also ends with a code, so the time decides.
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

# sanitize TOOL PART: runs a third of the tests marked `sanitize` under a tool; each tensor has an allocation of its own
sanitize() {
  local tool
  tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer) || return
  # PyTorch asks the driver questions that fail by design, such as whether a pointer is on the device.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 run prove "$1-$2" "$tool" --tool "$1" --error-exitcode 9 --report-api-errors no \
    "$python" -m pytest tests -n 0 -m sanitize --part "$2/3" --device cuda -q -p no:cacheprovider
}

prove() {
  local workers=() names=(tests) name
  if "$python" -c "import xdist" 2>/dev/null; then
    workers=(-n "$(($(nproc) > 4 ? $(nproc) - 4 : 2))" --dist worksteal)
  fi
  run prove tests "$python" -m pytest "${tests[@]}" -m "not slow and not gpu" --device "$device" -q -rfE --tb=short \
    "${workers[@]}" &
  for bench in "${benches[@]}"; do
    name=rehearsal-$(basename "$bench" .py)
    names+=("$name")
    # `nice` lets the tests, which take longest, go first.
    TORCHINDUCTOR_COMPILE_THREADS=4 run prove "$name" nice "$python" -m pytest "$bench" --device "$device" --rehearse \
      -q -p no:cacheprovider &
  done
  if [[ $device == cuda ]]; then
    rm -f "$logs"/{mem,race}check-*.outcome
    for name in {mem,race}check-{1,2,3}; do
      names+=("$name")
      (sanitize "${name%-*}" "${name#*-}" || echo "$name: failed: compute-sanitizer is not here" |
        tee "$logs/$name.outcome") &
    done
  fi
  wait
  settle "${names[@]}"
}

for stage in "${stages[@]}"; do
  case $stage in
    install) run install install "$python" -m pip install --no-deps --no-build-isolation -e . ; settle install ;;
    doctor)
      # Without a GPU there is nothing to test.
      if [[ $device == cuda ]]; then
        run doctor doctor "$python" -m fusedseg doctor --gpu --json "$logs/doctor.json" --overwrite
        settle doctor
      fi
      ;;
    suite) run suite suite "$python" -m pytest "${tests[@]}" -m gpu --device "$device" -q -rfE --tb=short ; settle suite ;;
    prove) prove ;;
    bench) run bench bench "$python" -m pytest "${benches[@]}" --device "$device" -q -rfE ; settle bench ;;
    steps)
      # Without a GPU it rehearses with tiny networks.
      how=(--seconds 600)
      [[ $device == cuda ]] || how=(--rehearse)
      run steps steps "$python" -m pytest bench/gpu/test_steps.py --device "$device" "${how[@]}" -q -rfE
      settle steps
      ;;
    more) run more more "$python" -m pytest bench -m slow --device "$device" -q -rfE ; settle more ;;
    report)
      results=$("$python" -c "import torch; from bench.results import default_directory
print(default_directory(torch.device('$device')))") &&
        run report report "$python" -m bench.report "$results"
      settle report
      ;;
    *)
      echo "bench/gpu/gpu.sh: no stage '$stage'; there are install, doctor, suite, prove, bench, steps, more and report" >&2
      exit 2
      ;;
  esac
done

for name in "${failed[@]}"; do
  printf '\n== %s, the end of its log\n' "$name"
  tail -n 40 "$logs/$name.log"
done
for name in doctor suite bench steps more report; do
  if [[ " ${stages[*]} " == *" $name "* && -f $logs/$name.log && " ${failed[*]} " != *" $name "* ]]; then
    printf '\n== %s\n' "$name"
    tail -n 80 "$logs/$name.log"
  fi
done
printf '\n'; printf '%s\n' "== outcomes after $SECONDS s" "${outcomes[@]}"
((${#failed[@]} == 0))
