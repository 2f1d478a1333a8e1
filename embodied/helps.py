"""What `--help` says, of the whole and of each command."""

from __future__ import annotations

HELP = """\
embodied: sim-to-real reinforcement learning for robots

usage: embodied <command> key=value ...

  train      train a policy for a task, then evaluate it
  eval       success rate of a trained policy, with its confidence interval
  play       recording and video of a trained policy
  collect    episodes of a trained policy, or of a task's script, as a LeRobot dataset
  export     a trained policy as one self-describing ONNX file
  deploy     a policy on a robot: check, sim, run, stop, clear, faults, replay, repair
  bench sim  speed of a task's simulation
  tasks      the tasks that can be trained, and their options
  doctor     check this machine and say how to mend it; whether a training fits its memory

  embodied train task=assembly                  embodied <command> --help
  embodied eval                                 embodied --version
"""

CONFIGURED = """
  -m            run every combination of several values, in turn: -m seed=0,1,2 sampler=success_guided,uniform
  --cfg job     print the resolved configuration as YAML and stop
  EMBODIED_DEBUG=1 in the environment shows tracebacks
"""

RUN_KEYS = """
  task=         what to learn; `embodied tasks` lists them           robot=franka
  sampler=      how resets are drawn (success_guided)                policy=mlp|flow|diffusion  algo=ppo|grpo|hiors|sft
  task.* robot.* sampler.* policy.* algo.*      options of the above, shown by --cfg job

  sim.num_worlds=1024       worlds in parallel       sim.engine=cpu  sim.threads=0 (every core)
  seed=0                    of everything random     device=cpu
  values here are those of task=assembly; what is usual for another task, `embodied tasks` shows
"""

HELPS = {
    "train": f"""\
usage: embodied train task=<task> key=value ...
       embodied train resume=<run> budget.<bound>=value
{RUN_KEYS}
  budget.iterations= budget.env_steps= budget.minutes= budget.target_success=0.96     whichever comes first; null: none
  eval.every=10  eval.episodes=200  eval.randomise=false     evaluations during training
  episodes=500              of the final evaluation; eval.sampled=false: true evaluates sampled actions, too
  save.every=10             iterations between checkpoints
  out=runs/<task>/<date-time>-<seed>            folder of the run, must be new
  start=<run>               begin with that run's policy, e.g. one that has imitated demonstrations
  resume=<run>              continue a run exactly where its last checkpoint left it
{CONFIGURED}""",
    "eval": f"""\
usage: embodied eval checkpoint=<run> key=value ...

  checkpoint=   folder of a run, or one of its checkpoint files; the newest under runs/ by default
  episodes=500  seed=0  device=cpu  out=<folder>
  task.* robot.* sim.* eval.*       change what the run was trained with
{CONFIGURED}""",
    "play": f"""\
usage: embodied play checkpoint=<run> key=value ...

  checkpoint=   folder of a run, or one of its checkpoint files; the newest under runs/ by default
  episodes=  seed=0  device=cpu  out=<folder>
  task.* robot.* sim.* eval.*       change what the run was trained with
{CONFIGURED}""",
    "collect": f"""\
usage: embodied collect checkpoint=<run> out=<folder> key=value ...
       embodied collect task=<task> expert=script out=<folder> key=value ...

  out=          folder of the dataset, must be new: LeRobot v3, which algo=sft learns from with algo.data=
  checkpoint=   folder of a run, or one of its checkpoint files; the newest under runs/ by default
  expert=script     in place of a policy, a script that sees what a policy sees: task=assembly has one
  episodes=500  seed=0  device=cpu
  task.* robot.* sim.* eval.*       change what the run was trained with
{CONFIGURED}""",
    "export": """\
usage: embodied export checkpoint=<run> [out=<file.onnx>]

  checkpoint=   folder of a run, or one of its checkpoint files; the newest under runs/ by default
  out=          file to write, must be new; policy.onnx in the run's folder by default, which is replaced
""",
    "deploy": """\
usage: embodied deploy <command> key=value ...

  sim      a simulated robot, as a process of its own
  check    does an exported policy fit a robot, name by name
  run      the policy drives the robot, through the guard, recorded
  stop     emergency stop, latched in the robot        clear    let it move again
  faults   inject faults, and measure at the robot what comes of them
  replay   a journal as a rerun recording              repair   set a journal's torn end aside

  embodied deploy sim task=assembly                    embodied deploy <command> --help
  embodied deploy run policy=runs/a episodes=3
""",
    "deploy check": """\
usage: embodied deploy check policy=<file.onnx> key=value ...

  policy=       an exported policy, or the folder of a run that was exported
  robot=127.0.0.1:47000     address of the robot process
  key_file=     file with the shared key; needed for an address that is not this machine

Names every difference between what the policy was made for and what the robot says of itself.
""",
    "deploy sim": """\
usage: embodied deploy sim task=<task> key=value ...

A simulated robot in the task's cell, as a process of its own that runs at the wall clock.

  port=47000  host=127.0.0.1  key_file=       where it listens
  seed=0                    of sensor noise
  watchdog_s=0.1            without a command for so long, the robot stops by itself
  lockstep=false            time passes only with commands
  log=<file>                what the robot heard and did (a journal)
  task.* robot.*            the cell, as for training
  reality=nominal           how the robot differs from the simulation: nominal, shifted, or a YAML file
  reality.friction= gains= mass= clearance=1.0      factors
  reality.delay=0           control steps between a command and its effect
  reality.offset=[0,0,0]    constant error of the seen socket [m]
  reality.position_noise= force_noise=  reversed_joints=false
""",
    "deploy run": """\
usage: embodied deploy run policy=<file.onnx> key=value ...

  policy=       an exported policy, or the folder of a run that was exported
  robot=127.0.0.1:47000     address of the robot process
  episodes=1  seed=0        scenes seed, seed + 1, ...
  hold_s=0.5                how long something may be late before the run ends
  realtime=true             ask for real-time priority
  out=runs/deploy/<date-time>     folder, must be new: journal.emb, summary.json
  key_file=     file with the shared key; needed for an address that is not this machine

Ctrl-C ends the present episode at rest. `embodied deploy stop` is the emergency stop.
""",
    "deploy stop": """\
usage: embodied deploy stop [robot=127.0.0.1:47000] [key_file=]

Emergency stop: the robot stops, whoever holds it, and stays so until `embodied deploy clear`.
""",
    "deploy clear": """\
usage: embodied deploy clear [robot=127.0.0.1:47000] [key_file=]

Lets a robot move again after an emergency stop.
""",
    "deploy faults": """\
usage: embodied deploy faults policy=<file.onnx> key=value ...

  policy=       an exported policy, or the folder of a run that was exported
  rows=<name>,...           all by default; a wrong name lists them
  seed=0                    of scenes, moments and chance
  kills=3                   of everything at random moments, in torn_journal_kill
  out=runs/faults/<date-time>     folder, must be new: faults.json, the logs of each row

Injects faults between a runner and a simulated robot and measures at the robot what comes of them.
""",
    "deploy replay": """\
usage: embodied deploy replay journal=<file> [out=<file.rrd>] [episode=<number>]

A journal as a recording for the rerun viewer.
""",
    "deploy repair": """\
usage: embodied deploy repair journal=<file>

Sets a torn end aside, so that the journal can be read; nothing is deleted.
""",
    "bench sim": f"""\
usage: embodied bench sim task=<task> key=value ...
{RUN_KEYS}{CONFIGURED}""",
    "bench": "usage: embodied bench sim task=<task> key=value ...   (embodied bench sim --help)\n",
    "tasks": "usage: embodied tasks\n\nLists the tasks that can be trained, and their options.\n",
    "doctor": f"""\
usage: embodied doctor
       embodied doctor task=<task> key=value ...

Alone: checks this machine and says how to mend what is missing.

With a task, and whatever else `embodied train` takes: how much memory that training needs, item by item, whether it fits this
machine (exit code 1 if not), and the largest sim.num_worlds that does. For sim.engine=cpu and device=cpu; nothing is kept.
{RUN_KEYS}{CONFIGURED}""",
}
