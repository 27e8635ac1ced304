"""`headrace eval RUN`: the return of a run's policy over fresh episodes, acting greedily."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.commands.parser import Parser, count
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.envs.base import Env
    from headrace.policy import Policy

__all__ = ["check_spec", "environment_of", "main"]

LONGEST = 108_000
"""Steps of an episode: half an hour of Atari without frame skip, as in the evaluations of training."""
_BY_ID = ("headrace.envs.gymnasium:Gymnasium", "headrace.envs.atari:Atari", "headrace.envs.envpool:EnvPool")
"""The classes of environments of which an id and plain arguments say all."""


def main(argv: list[str]) -> int:
    """Print the score. The same twice: normalisers are frozen, seeds are arguments, and no file is changed."""
    parser = Parser("eval", "The return of a run's policy over fresh episodes, acting greedily. Changes no file.")
    parser.add_policy(seed_of="of the episodes")
    parser.add_argument("--episodes", type=count, default=20, metavar="N", help="how many (default: 20)")
    parser.add_argument("--max-steps", type=count, default=LONGEST, metavar="N", help=_MAX_STEPS)
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the return of every episode")
    given = parser.parse(argv)

    from headrace.actor import evaluate
    from headrace.policy import load
    from headrace.record.folder import RunFolder

    folder = RunFolder.find(given.run)
    config = folder.config()
    seed = config["seed"] if given.seed is None else given.seed
    policy = load(folder.path, given.checkpoint)
    assert policy.checkpoint is not None
    step = policy.checkpoint.step
    env = environment_of(config)
    check_spec(policy, env)
    returns = evaluate(policy.method, policy.net, env, given.episodes, seed, given.max_steps)
    mean, std, low, high = (float(value) for value in (returns.mean(), returns.std(), returns.min(), returns.max()))
    if given.json:
        told = {"run": str(folder.path), "method": config["method"], "env": config["env"], "env_steps": step}
        told |= {"episodes": len(returns), "seed": seed, "mean": mean, "std": std, "min": low, "max": high}
        print(json.dumps({**told, "returns": returns.tolist()}))
        return 0
    print(f"{config['method']} on {config['env']} after {step:,} steps ({policy.checkpoint.folder})")
    print(f"{len(returns)} episodes with seed {seed}: {mean:.1f} ± {std:.1f}, from {low:.1f} to {high:.1f}")
    return 0


_MAX_STEPS = "of an episode; where one is longer there is no score (default: 108,000)"


def environment_of(config: Mapping[str, Any], **others: Any) -> Env:
    """The environments that a run's configuration names. others: arguments instead of the run's, or beside them.

    Raises ConfigError where the configuration does not say all of them, since they were made in Python.
    """
    opaque = [key for key in config.get("opaque", ()) if key == "env" or key.startswith("env.")]
    kind = config.get("classes", {}).get("env", _BY_ID[0])
    if opaque or kind not in _BY_ID:
        what = f"{', '.join(opaque)}, which no file can hold" if opaque else kind
        raise ConfigError(
            f"the environments of this run were made in Python, of {what}. Make them there again: policy = "
            "headrace.load(RUN), then headrace.evaluate(policy.method, policy.net, env, episodes=20)."
        )
    from headrace.envs.registry import environment
    from headrace.settings import Unfit, convert

    values = {key.removeprefix("env."): value for key, value in config.items() if key.startswith("env.")}
    try:
        if "wrappers" in values:  # functions, which are written by their names
            values["wrappers"] = convert(values["wrappers"], tuple[Callable[..., Any], ...])
    except Unfit as error:
        raise ConfigError(f"env.wrappers={values['wrappers']!r}: expected {error}") from error
    return environment(config["env"], **{**values, **others})


def check_spec(policy: Policy, env: Env) -> None:
    """Raise ConfigError for environments that are not like those of the run."""
    if env.spec != policy.spec:
        raise ConfigError(
            f"{env!r} has {env.spec}; the run was trained with {policy.spec}. Use the package and the arguments of "
            "then; the run's machine.json has the versions."
        )
