"""The GPU suite behind `scripts/gpu`: see suite.py, and docs/gpu-suite.md.

suite      the command: options, the device, one process for each part, the result as Markdown
parts      which parts there are, and how long each may take
record     how a part tells what it found, line by line; `reaches` judges it, `report` writes it
timing     device time of a call; `warm` has kernels compiled beforehand
PART.py    a part, run as `python -m gpu.PART`; parts share `checks`, `caches`, `served`, `synthetic`, `shapes`, `tune_rules`
pack       wheels for a machine without internet
"""
