#!/bin/sh
# Profiles the digits example twice, shows the first report, compares both. Reports go to ./demo.
set -eu
cd "$(dirname "$0")/.."
rm -rf demo
mkdir demo
for report in demo/a.jsonl demo/b.jsonl; do
    echo
    echo "\$ lucid profile run --pairs 2 -o $report -- python examples/train_digits.py"
    lucid profile run --pairs 2 -o "$report" -- python examples/train_digits.py
done
echo
echo "\$ lucid report show demo/a.jsonl"
lucid report show demo/a.jsonl
echo
echo "\$ lucid report diff demo/a.jsonl demo/b.jsonl"
lucid report diff demo/a.jsonl demo/b.jsonl
