"""The learners that peers.py compares, each behind `iterate` (one training iteration, timed), `policy` and `close`."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from embodied.algos.trainer import single_threaded
from embodied.commands.build import make_policy, make_task, make_training_env
from embodied.compose import options
from embodied.spec import registry
from embodied.spec.protocols import Obs, Step

REWARD_SCALE = 0.01  # for learners that do not normalise returns


class Timed:
    """Worlds, and the seconds that were spent in stepping them."""

    def __init__(self, config: dict[str, Any], critic: str) -> None:
        self.worlds = make_training_env(config, make_task(config), print)
        self.num_worlds, self.action_size = self.worlds.num_worlds, self.worlds.action_size
        self.obs_sizes = dict(self.worlds.obs_sizes)
        self.obs_sizes["critic"] = self.obs_sizes[critic]
        self._critic, self.seconds = critic, 0.0

    def view(self, obs: Obs) -> Obs:
        """The groups, with what the critic is to see."""
        return {"policy": obs["policy"], "critic": obs[self._critic]}

    def step(self, action: Tensor) -> tuple[Obs, Tensor, Tensor, Tensor, dict[str, Any]]:
        """As `VecEnv.step`; with one torch thread, as in training."""
        began = time.perf_counter()
        with single_threaded(self.num_worlds):
            obs, reward, terminated, truncated, info = self.worlds.step(action)
        self.seconds += time.perf_counter() - began
        info["final_obs"] = self.view(info["final_obs"])
        return self.view(obs), reward, terminated, truncated, info


class Embodied:
    """This project's PPO."""

    def __init__(self, config: dict[str, Any], seed: int, critic: str) -> None:
        self.env = Timed(config, critic)
        self._policy = make_policy(config, self.env.obs_sizes, self.env.action_size)
        build = registry.find("algo", "ppo").build
        sizes = (self.env.obs_sizes, self.env.action_size, self.env.num_worlds)
        self.learner = build(options("algo", config), self._policy, *sizes, "cpu", seed)
        self.obs = self.env.view(self.env.worlds.reset(seed))

    def iterate(self) -> dict[str, float]:
        """As `embodied.algos.trainer.Trainer.iterate`."""
        began, self.env.seconds = time.perf_counter(), 0.0
        with single_threaded(self.env.num_worlds):
            for _ in range(self.learner.steps_per_iteration):
                self.obs, *outcome = self.env.step(self.learner.act(self.obs))
                self.learner.observe(self.obs, *outcome)
        collected = time.perf_counter()
        self.learner.update()
        done = time.perf_counter()
        self.env.worlds.end_iteration(self.learner.advantage)
        steps = self.learner.steps_per_iteration * self.env.num_worlds
        return {"total": done - began, "env": self.env.seconds, "update": done - collected, "steps": steps}

    def policy(self) -> Any:
        """What is evaluated."""
        return self._policy

    def close(self) -> None:
        """Nothing to do."""


class Acts:
    """A function of observations [N, D] as a policy that can be evaluated."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def act(self, obs: Obs, carry: Any = None, deterministic: bool = True) -> Step:
        """Its action, clipped as worlds do."""
        action = self._function(obs["policy"]).clamp(-1, 1)
        return Step(action[:, None], action.new_zeros(len(action)), {}, carry)


class RslRl:
    """rsl_rl's PPO in the loop of its OnPolicyRunner, without the logger."""

    def __init__(self, config: dict[str, Any], seed: int, critic: str) -> None:
        from rsl_rl.algorithms import PPO
        from rsl_rl.models import MLPModel
        from rsl_rl.storage import RolloutStorage
        from tensordict import TensorDict

        torch.manual_seed(seed)
        self.env, self._as_dict = Timed(config, critic), TensorDict
        ours, hidden = config["algo"], list(config["policy"]["hidden"])
        self.obs = self._group(self.env.view(self.env.worlds.reset(seed)))
        groups = {"actor": ["policy"], "critic": ["critic"]}
        gaussian = {"class_name": "rsl_rl.modules.distribution.GaussianDistribution", "init_std": config["policy"]["init_std"]}
        self.actor = MLPModel(self.obs, groups, "actor", self.env.action_size, hidden, "elu", True, gaussian)
        value = MLPModel(self.obs, groups, "critic", 1, hidden, "elu", True)
        self._steps = ours["num_steps"]
        self.learner = PPO(
            self.actor,
            value,
            RolloutStorage("rl", self.env.num_worlds, self._steps, self.obs, [self.env.action_size], "cpu"),
            num_learning_epochs=ours["epochs"],
            num_mini_batches=4,
            clip_param=ours["clip"],
            gamma=ours["gamma"],
            lam=ours["lam"],
            value_loss_coef=ours["value_coef"],
            entropy_coef=ours["entropy"],
            learning_rate=ours["learning_rate"],
            max_grad_norm=ours["max_grad_norm"],
            desired_kl=ours["desired_kl"],
        )

    def _group(self, obs: Obs) -> Any:
        return self._as_dict(obs, batch_size=[self.env.num_worlds])

    def iterate(self) -> dict[str, float]:
        """One iteration."""
        began, self.env.seconds = time.perf_counter(), 0.0
        self.learner.train_mode()
        with torch.inference_mode():
            for _ in range(self._steps):
                action = self.learner.act(self.obs)
                obs, reward, terminated, truncated, info = self.env.step(action)
                self.obs = self._group(obs)
                done = terminated | truncated | info["invalid"]
                self.learner.process_env_step(self.obs, REWARD_SCALE * reward, done, {"time_outs": truncated.float()})
        collected = time.perf_counter()
        with torch.inference_mode():
            self.learner.compute_returns(self.obs)
        self.learner.update()
        done_at = time.perf_counter()
        self.env.worlds.end_iteration(None)
        steps = self._steps * self.env.num_worlds
        return {"total": done_at - began, "env": self.env.seconds, "update": done_at - collected, "steps": steps}

    def policy(self) -> Acts:
        """What is evaluated."""
        self.learner.eval_mode()
        return Acts(lambda obs: self.actor(self._as_dict({"policy": obs}, batch_size=[len(obs)])))

    def close(self) -> None:
        """Nothing to do."""


def _learner(env: Any, config: dict[str, Any], seed: int, steps: int, rate: float) -> Any:
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import configure

    ours, hidden = config["algo"], list(config["policy"]["hidden"])
    learner = PPO(
        "MlpPolicy",
        env,
        n_steps=steps,
        batch_size=steps * env.num_envs // 4,
        n_epochs=ours["epochs"],
        learning_rate=rate,
        gamma=ours["gamma"],
        gae_lambda=ours["lam"],
        clip_range=ours["clip"],
        ent_coef=ours["entropy"],
        vf_coef=ours["value_coef"],
        max_grad_norm=ours["max_grad_norm"],
        policy_kwargs={
            "net_arch": {"pi": hidden, "vf": hidden},
            "activation_fn": torch.nn.ELU,
            "log_std_init": float(np.log(config["policy"]["init_std"])),
        },
        seed=seed,
        device="cpu",
    )
    learner.set_logger(configure(None, []))
    return learner


def _iteration(learner: Any) -> tuple[float, float]:
    """Seconds of one iteration in all, and of its update; `learn` again would otherwise reset the worlds."""
    from stable_baselines3.common.callbacks import CallbackList

    if learner._last_obs is None:
        learner._setup_learn(10**9, None)
    callback = CallbackList([])
    callback.init_callback(learner)
    began = time.perf_counter()
    learner.collect_rollouts(learner.env, callback, learner.rollout_buffer, learner.n_steps)
    collected = time.perf_counter()
    learner.train()
    done = time.perf_counter()
    return done - began, done - collected


class StableBaselines:
    """Stable-Baselines3's PPO on our worlds; it sees the group `policy` alone."""

    def __init__(self, config: dict[str, Any], seed: int, critic: str) -> None:
        from stable_baselines3.common.vec_env import VecEnv, VecNormalize

        self.env = Timed(config, "policy")
        timed = self.env

        class Worlds(VecEnv):
            """Ours as its VecEnv."""

            def __init__(self) -> None:
                box = gym.spaces.Box
                size, actions = timed.obs_sizes["policy"], timed.action_size
                super().__init__(
                    timed.num_worlds, box(-np.inf, np.inf, (size,), np.float32), box(-1, 1, (actions,), np.float32)
                )

            def reset(self) -> np.ndarray:
                return timed.worlds.reset(seed)["policy"].numpy()

            def step_async(self, actions: np.ndarray) -> None:
                self._actions = torch.from_numpy(actions)

            def step_wait(self) -> Any:
                obs, reward, terminated, truncated, info = timed.step(self._actions)
                done = (terminated | truncated | info["invalid"]).numpy()
                infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
                last = info["final_obs"]["policy"].numpy()
                for i in np.flatnonzero(done):
                    infos[i] = {"terminal_observation": last[i], "TimeLimit.truncated": bool(truncated[i])}
                return obs["policy"].numpy(), REWARD_SCALE * reward.numpy(), done, infos

            def close(self) -> None:
                """Nothing to do."""

            def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
                return [False] * self.num_envs

            def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
                return [None] * self.num_envs

            def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
                raise NotImplementedError

            def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
                raise NotImplementedError

        self._normalise = VecNormalize(Worlds(), norm_reward=False)
        # `critic` says what the comparison is of: the same arithmetic, or learning
        rate = config["algo"]["learning_rate"] if critic == "policy" else 3e-4
        self.learner = _learner(self._normalise, config, seed, config["algo"]["num_steps"], rate)

    def iterate(self) -> dict[str, float]:
        """One iteration."""
        self.env.seconds = 0.0
        total, update = _iteration(self.learner)
        self.env.worlds.end_iteration(None)
        steps = self.learner.n_steps * self.env.num_worlds
        return {"total": total, "env": self.env.seconds, "update": update, "steps": steps}

    def policy(self) -> Acts:
        """What is evaluated."""

        def act(obs: Tensor) -> Tensor:
            seen = self._normalise.normalize_obs(obs.numpy()).astype(np.float32)
            return torch.from_numpy(self.learner.predict(seen, deterministic=True)[0])

        return Acts(act)

    def close(self) -> None:
        """Nothing to do."""


class StableBaselinesProcesses:
    """Stable-Baselines3's PPO with one process a world; as many as sim.num_worlds says."""

    def __init__(self, config: dict[str, Any], seed: int, critic: str) -> None:
        from functools import partial

        from single_world import SingleWorld
        from stable_baselines3.common.vec_env import SubprocVecEnv

        count = config["sim"]["num_worlds"]
        os.environ["OMP_NUM_THREADS"] = "1"  # of the worlds; the learner has its threads already
        self._env = SubprocVecEnv([partial(SingleWorld, config, seed + i) for i in range(count)], start_method="spawn")
        steps = 1024 * config["algo"]["num_steps"] // count // 4
        self.learner = _learner(self._env, config, seed, steps, config["algo"]["learning_rate"])

    def iterate(self) -> dict[str, float]:
        """A quarter of an iteration; the worlds' time is not told apart from the learner's."""
        total, update = _iteration(self.learner)
        return {"total": total, "env": total - update, "update": update, "steps": self.learner.n_steps * self.learner.n_envs}

    def close(self) -> None:
        """End the processes."""
        self._env.close()
