"""What runs at every step must not wait for the device: no value is read back, no shape depends on data."""

import ast
import inspect
import textwrap

import pytest
import torch

from embodied.algos import grpo, losses, ppo, returns, rollout, surrogate
from embodied.policies import gaussian, networks, normaliser
from embodied.sim import env
from embodied.sim.engines import warp
from embodied.sim.samplers import drawing, linear, plr, success_guided, table, uniform
from embodied.sim.tasks import assembly
from embodied.spec import observe

# every function of these modules, but for those that run once, or once an iteration and are known to read
HOT = {
    losses: (),
    returns: (),
    rollout: ("__init__", "check", "state_dict", "load_state_dict"),
    ppo: ("__init__", "validate", "update", "state_dict", "load_state_dict", "_update"),
    grpo: ("__init__", "validate", "update", "_update", "state_dict", "load_state_dict"),
    surrogate: ("__init__", "state_dict", "load_state_dict", "learn", "_minibatches"),
    gaussian: ("__init__", "validate", "group_size"),
    networks: ("check_mlp", "mlp", "__init__"),
    normaliser: (),
    env: ("__init__", "reset", "_report", "load_state_dict"),
    drawing: ("__init__", "state_dict", "load_state_dict", "end_iteration"),
    table: ("__init__", "check_history", "load_state_dict"),
    success_guided: ("__init__", "validate"),
    uniform: ("__init__", "validate"),
    linear: ("__init__", "validate"),
    plr: ("__init__", "validate"),
    assembly: ("__init__",),
    observe: (),
    warp: ("__init__", "render", "get_state"),
}
READS = {"item", "cpu", "tolist", "numpy"}
CALLS = {"nonzero", "masked_select", "unique", "argwhere"}
MASKS = {"mask", "valid", "ended", "invalid", "done", "success", "failure", "terminated", "truncated", "good", "ids_mask"}


def faults(source: str, but: tuple[str, ...] = ()) -> list[str]:
    """Function, line and cause of each host read in the functions of a module, where not on a CPU."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name not in but:
            for node in on_any_device(function.body):
                found += [f"{function.name}, line {node.lineno}: {cause}" for cause in causes(node)]
    return found


def on_any_device(body: list[ast.stmt]):
    """Expressions and statements, but for those under a condition that speaks of the CPU."""
    for statement in body:
        if isinstance(statement, ast.If) and speaks_of_cpu(statement.test):
            if negative(statement.test):
                yield from on_any_device(statement.body)
                if isinstance(statement.body[-1], ast.Return):
                    return  # what follows is for a CPU
            else:
                yield from on_any_device(statement.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from on_any_device(getattr(statement, field, []))
        if not isinstance(statement, ast.FunctionDef):
            yield from (node for node in expressions(statement))


def expressions(statement: ast.stmt):
    inner = {id(s) for field in ("body", "orelse", "finalbody") for s in getattr(statement, field, [])}
    stack = [child for child in ast.iter_child_nodes(statement) if id(child) not in inner]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.expr):
            yield node
        stack += ast.iter_child_nodes(node)


def speaks_of_cpu(test: ast.expr) -> bool:
    text = ast.unparse(test)
    return "'cpu'" in text or "compact" in text


def negative(test: ast.expr) -> bool:
    return "!= 'cpu'" in ast.unparse(test)


def causes(node: ast.AST):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name in READS and not node.args:
            yield f".{name}()"
        if name in CALLS:
            yield f"{name}: a shape that depends on data"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool":
        yield "bool()"
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        index = node.slice
        name = index.attr if isinstance(index, ast.Attribute) else getattr(index, "id", "")
        inverted = isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.Invert)
        if isinstance(index, ast.Compare) or inverted or name in MASKS:
            yield f"indexed by a mask: {ast.unparse(node)}"


@pytest.mark.parametrize("module", HOT, ids=lambda module: module.__name__)
def test_no_hot_function_reads_the_host(module):
    source = inspect.getsource(module)
    assert faults(source, HOT[module]) == []
    defined = {f.name for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef)}
    assert set(HOT[module]) <= defined  # an exception whose function is gone


@pytest.mark.parametrize(
    "line",
    [
        "return x.max().item()",
        "y = x.cpu()",
        "rows = x.tolist()",
        "if bool(x.any()): return 1",
        "return x[ended]",
        "return x[~self.valid]",
        "return x[x > 0]",
        "ids = torch.nonzero(ended)[:, 0]",
        "for i in x.tolist(): pass",
        "with a: y = [z.item() for z in x]",
        "if device.type != 'cpu': return x.item()",
    ],
)
def test_the_check_finds_what_it_is_for(line):
    assert len(faults(f"def f(x, ended):\n    {line}")) == 1


@pytest.mark.parametrize(
    "body",
    [
        "if device.type == 'cpu':\n    return x.item()",
        "if x.device.type != 'cpu':\n    return x\nreturn x.item()",
        "return x[ids]",
        "x[ended] = 0.0",
        "return torch.where(ended, x, 0.0)",
    ],
)
def test_the_check_lets_pass_what_is_allowed(body):
    assert faults("def f(x, ended):\n" + textwrap.indent(body, "    ")) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_learner_on_a_gpu_waits_for_nothing():
    from embodied.algos.ppo import PPO, PPOOptions
    from embodied.policies.gaussian import GaussianPolicy, MLPOptions

    sizes = {"policy": 5, "critic": 7}
    learner = PPO(PPOOptions(num_steps=4), GaussianPolicy(MLPOptions(), sizes, 3), sizes, 3, 64, "cuda", 0)
    obs = {group: torch.randn(64, size, device="cuda") for group, size in sizes.items()}
    no = torch.zeros(64, dtype=torch.bool, device="cuda")
    for round_ in range(2):
        torch.cuda.set_sync_debug_mode("error" if round_ else "default")
        for _ in range(4):
            learner.act(obs)
            learner.observe(obs, torch.ones(64, device="cuda"), no, no, {"invalid": no, "final_obs": obs})
        torch.cuda.set_sync_debug_mode("default")
        learner.update()
