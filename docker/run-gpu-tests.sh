#!/usr/bin/env bash
# What only a GPU can show: the GPU profile of docker/compose.yaml comes up healthy, and `make test-gpu` passes.
# Without a GPU it says so and exits with 0: its last line counts the run as skipped, not as passed.
# NEVER RUN WITH A GPU by us (docs/deployment.md); tests/docker/test_gpu_runner.py runs its decisions with stand-ins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

skip() {
  echo "gpu: $1: nothing was run on a GPU"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
}

command -v nvidia-smi >/dev/null || skip "there is no nvidia-smi here"
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || true
[ "${gpus:-0}" -gt 0 ] || skip "nvidia-smi sees no GPU"
echo "gpu: $gpus found"
nvidia-smi --query-gpu=name,memory.total,driver_version,compute_cap --format=csv,noheader

passed=0
failed=0
check() {
  echo "gpu: $1"
  if "${@:2}"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "gpu: FAILED $1"; fi
}

if docker version --format '{{.Server.Version}}' >/dev/null 2>&1; then
  export HEADRACE_SECRETS MODELS
  HEADRACE_SECRETS=$(mktemp -d)
  MODELS=${MODELS:-$HEADRACE_SECRETS}
  chmod 755 "$HEADRACE_SECRETS"
  for name in etcd-root-password etcd-password; do
    head -c 18 /dev/urandom | base64 >"$HEADRACE_SECRETS/$name"
    chmod 444 "$HEADRACE_SECRETS/$name"
  done
  stack=(docker compose -p headrace-gpu-test -f docker/compose.yaml --profile gpu)
  trap '"${stack[@]}" down --volumes >/dev/null 2>&1; rm -rf "$HEADRACE_SECRETS"' EXIT
  check "the GPU profile comes up healthy" "${stack[@]}" up --build --detach --wait
  check "a container sees the GPUs" "${stack[@]}" exec -T worker-gpu nvidia-smi --list-gpus
  "${stack[@]}" logs --tail 50 worker-gpu || true
  "${stack[@]}" stop >/dev/null 2>&1 || true # the tests below need the GPUs
else
  echo "gpu: no Docker engine answers: the GPU profile was not run"
fi

if grep -q '^test-gpu:' Makefile; then
  check "make test-gpu" make test-gpu
else
  echo "gpu: the Makefile has no test-gpu: it was not run"
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
