"""`headrace enjoy RUN`: watch a run's policy play, in a window or in an animated file."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.commands.eval import check_spec, environment_of
from headrace.commands.parser import Parser, count
from headrace.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from headrace.envs.base import Env
    from headrace.policy import Policy
    from headrace.struct import Tree

__all__ = ["main"]

_FILES = (".gif", ".png", ".webp")
_FASTEST = 50  # pictures a second in a file: what shows one may take those that are faster for much slower ones
_SMALLEST = 240  # pixels of a picture's longer side


def main(argv: list[str]) -> int:
    """Play, and print the return of every episode; where it is a file, its path at the end."""
    parser = Parser("enjoy", "Watch a run's policy play: in a window, or without a screen in an animated file.")
    parser.add_policy(seed_of="of the episodes")
    parser.add_argument("--episodes", type=count, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument("--video", metavar="FILE", help=f"write this file instead of opening a window ({_ENDINGS})")
    parser.add_argument("--fps", type=count, metavar="N", help="steps a second in the file (default: as it is meant)")
    parser.add_argument(
        "--max-steps", type=count, default=3000, metavar="N", help="after which an episode is cut off (default: 3,000)"
    )
    given = parser.parse(argv)
    if given.video is not None and Path(given.video).suffix.lower() not in _FILES:
        raise ConfigError(f"--video {given.video}: give a file that ends in {_ENDINGS}.")

    from headrace.policy import load
    from headrace.record.folder import RunFolder

    folder = RunFolder.find(given.run)
    config = folder.config()
    seed = config["seed"] if given.seed is None else given.seed
    policy = load(folder.path, given.checkpoint)
    shown: list[Any] = []  # the environments that were made, without a vector around them; the last one plays
    window = given.video is None and _has_screen()
    env, window = _shown(config, shown, window)
    check_spec(policy, env)
    if window:
        for _ in _play(policy, env, given, seed):
            pass
        return 0
    see = _render(shown) if shown else _look(policy)
    fps = given.fps or (shown[-1].metadata.get("render_fps") if shown else None) or 30
    path = Path(given.video or f"{folder.path.resolve().name}.gif")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: {path.parent} is no folder. Give another --video FILE.")
    _write(path, (see(observation) for observation in _play(policy, env, given, seed)), fps)
    print(path)
    return 0


_ENDINGS = ", ".join(_FILES)


def _has_screen() -> bool:
    return not sys.platform.startswith("linux") or any(os.environ.get(key) for key in ("DISPLAY", "WAYLAND_DISPLAY"))


def _shown(config: Mapping[str, Any], shown: list[Any], window: bool) -> tuple[Env, bool]:
    """The environments of the run, made so that they can be seen, and whether that is in a window.

    shown: takes those of gymnasium as they are made; others show what they observe.
    """
    from headrace.envs.gymnasium import Gymnasium

    env = environment_of(config)
    if not isinstance(env, Gymnasium):
        return env, False

    def keep(one: Any) -> Any:
        shown.append(one)
        return one

    probe = environment_of(config, wrappers=[*env.wrappers, keep])
    _ = probe.spec  # makes one
    modes = shown[-1].metadata.get("render_modes") or []
    mode = "human" if window and "human" in modes else "rgb_array"
    if mode not in modes:
        raise ConfigError(f"{env!r} has no picture: its render modes are {modes}, and 'rgb_array' was expected.")
    if mode == "rgb_array":  # pictures are drawn without a screen, and without a greeting
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    return environment_of(config, wrappers=[*env.wrappers, keep], render_mode=mode), mode == "human"


def _play(policy: Policy, env: Env, given: Namespace, seed: int) -> Iterator[Tree]:
    """Every observation [1, …] of the episodes, one after the other. Prints how each ends."""
    vector = env.make(range(1))
    try:
        for episode in range(given.episodes):
            policy.reset()
            observation, gained, ended, steps = vector.reset(seed + episode), 0.0, False, 0
            yield observation
            while not ended and steps < given.max_steps:
                observation, reward, terminated, truncated = vector.step(policy.act(observation))
                gained, ended, steps = gained + float(reward[0]), bool(terminated[0] or truncated[0]), steps + 1
                within = ended and policy.spec.shortest_truncation is not None
                yield vector.final_observation() if within else observation
            cut = "" if ended else ", cut off there"
            print(f"episode {episode + 1}: return {gained:g} in {steps:,} steps{cut}")
    finally:
        vector.close()


def _render(shown: list[Any]) -> Callable[[Tree], Any]:
    """Asks the environment for its picture."""

    def see(_: Tree) -> Any:
        try:
            return shown[-1].render()
        except Exception as error:
            raise EnvironmentFault(
                f"the environment could not be drawn: render() raised {type(error).__name__}: {error}", environment=0
            ) from error

    return see


def _look(policy: Policy) -> Callable[[Tree], Any]:
    """Takes what the policy sees for the picture."""
    import optree

    from headrace.nets import is_image
    from headrace.spaces import leaves
    from headrace.struct import NAMESPACE

    images = [place for place, (_, space) in enumerate(leaves(policy.spec.observation)) if is_image(space)]
    if not images:
        raise ConfigError(
            f"there is nothing to see: these environments draw no picture, and {policy.spec.observation} is none."
        )

    def see(observation: Tree) -> Any:
        image = optree.tree_leaves(observation, namespace=NAMESPACE)[images[0]][0]
        if image.shape[0] < image.shape[-1]:  # channels first
            image = image.transpose(1, 2, 0)
        return image if image.shape[-1] == 3 else image[..., -1]  # the newest of those that are stacked

    return see


def _write(path: Path, pictures: Iterator[Any], fps: int) -> None:
    """An animated file of pictures [height, width, 3] or [height, width], uint8, at so many a second."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError('pictures are written by pillow, which is not installed. pip install "headrace[plot]"')
    from PIL import Image

    every = math.ceil(fps / _FASTEST)

    def frames() -> Generator[Image.Image, None, None]:
        for number, picture in enumerate(pictures):
            if number % every == 0:
                frame = Image.fromarray(picture)
                larger = max(1, _SMALLEST // max(frame.size))
                frame = frame.resize((frame.width * larger, frame.height * larger), Image.Resampling.NEAREST)
                yield frame.quantize(64, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)

    made = frames()
    try:
        next(made).save(path, save_all=True, append_images=made, duration=1000 * every / fps, loop=0)
    except OSError as error:
        raise ConfigError(f"{path} could not be written: {error}. Give another --video FILE.") from error
    finally:
        made.close()
