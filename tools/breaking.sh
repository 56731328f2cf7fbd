#!/usr/bin/env bash
# Compares the contract in the working tree with that of an earlier commit, by default the one before. Fails if a client
# of the earlier contract would break. Where there is nothing to compare with, it says so and does not fail: the tests
# compare with the first contract in any case.
set -euo pipefail
against=${1:-HEAD~1}

if ! commit=$(git rev-parse --verify --quiet "$against^{commit}"); then
  echo "no commit $against to compare the contract with; if the clone is shallow: git fetch --deepen 1" >&2
  exit 0
fi
if ! git cat-file -e "$commit:buf.yaml" 2>/dev/null; then
  echo "the commit $against has no contract to compare with" >&2
  exit 0
fi
buf breaking --against "$(git rev-parse --git-common-dir)#format=git,ref=$commit"
echo "nothing in the contract breaks since $against"
