"""Scale on one machine: `python benchmarks/scale.py predicted|million ...`.

`predicted` trains for two iterations with each of some numbers of worlds, in a process of its own, and compares the memory that
it really took with what `embodied doctor` says beforehand. Rollouts are short (`algo.num_steps=4 algo.epochs=1`), so that
physics does not take all day; `--words` replaces that.

`million` builds 2^20 worlds of the assembly task on the CPU engine with their sampler and bank, starts all of them, and takes
one control step with random actions, in which the worlds that end are reset; it prints the largest resident memory so far
after each of these. One physics thread: memory does not depend on it, and the machine stays usable.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

import torch

from embodied.commands.build import make_task, make_training_env
from embodied.commands.memory import peak, predict
from embodied.compose import compose

TASK = "task=assembly"
SHORT = ["algo.num_steps=4", "algo.epochs=1"]
RUN = ["budget.iterations=2", "budget.target_success=null", "episodes=32", "eval.episodes=32", "sim.threads=1"]
TRAIN = """
import sys
from embodied import cli
from embodied.commands.memory import peak
code = cli.main(sys.argv[1:])
print(peak())
sys.exit(code)
"""


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predicted", "million"])
    parser.add_argument("--words", nargs="+", default=SHORT, help="predicted: further words for `embodied train`")
    parser.add_argument("--worlds", type=int, nargs="+", default=[4096, 16384, 65536], help="predicted: numbers of worlds")
    parser.add_argument("--log2", type=int, default=20, help="million: 2 to the power of so many worlds")
    asked = parser.parse_args()
    if asked.what == "predicted":
        predicted(asked.worlds, asked.words)
    else:
        million(2**asked.log2)


def predicted(counts: list[int], words: list[str]) -> None:
    """A line for each number of worlds."""
    words = [TASK, *RUN, *words]
    memory = predict(compose("train", words).config)
    print(" ".join(words))
    print(f"{'worlds':>9} {'predicted':>10} {'measured':>10}  (MiB)  ratio")
    for count in counts:
        expected, found = memory.peak(count) / 2**20, measured([*words, f"sim.num_worlds={count}"]) / 2**20
        print(f"{count:>9} {expected:10.0f} {found:10.0f} {expected / found:13.3f}", flush=True)


def measured(words: list[str]) -> int:
    """The largest resident memory of a training, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TRAIN, "train", f"out={folder}/run", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"failed: {' '.join(words)}")
    return int(done.stdout.splitlines()[-1])


def million(count: int) -> None:
    """A line for each stage."""
    started = time.perf_counter()

    def say(stage: str) -> None:
        print(f"{time.perf_counter() - started:7.1f} s  {stage}: peak {peak() / 2**30:.2f} GiB", flush=True)

    torch.set_num_threads(1)
    config = compose("train", [TASK, f"sim.num_worlds={count}", "sim.threads=1"]).config
    task = make_task(config)
    say("nothing built yet")
    env = make_training_env(config, task, print)
    say(f"{count:,} worlds built, {env.bank.rows.shape[0]:,} configurations in the bank")
    env.reset(0)
    say("all started")
    action = 2 * torch.rand(count, env.action_size, generator=torch.Generator().manual_seed(0)) - 1
    _, _, terminated, truncated, info = env.step(action)
    ended = int((terminated | truncated | info["invalid"]).sum())
    say(f"one control step, {ended:,} worlds ended and were reset, {int(info['invalid'].sum())} of them invalid")


if __name__ == "__main__":
    main()
