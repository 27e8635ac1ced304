"""`headrace check-env ENV`: everything that is wrong with an environment, at once."""

from __future__ import annotations

from headrace.commands.parser import Parser, count, environment_arguments, seed

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Print what `headrace.check_env` finds; 1 if that is anything."""
    parser = Parser("check-env", "Try an environment out, and list everything that is wrong with it at once.")
    parser.add_argument("env", metavar="ENV", help='a registered id, or "package.module:Class"')
    parser.add_argument("--env.KEY", metavar="VALUE", help="an argument of the environment")
    parser.add_argument(
        "--steps", type=count, default=1000, metavar="N", help="of one long walk with random actions (default: 1,000)"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of all that is drawn (default: 0)")
    words, arguments = environment_arguments(argv)
    given = parser.parse(words)

    from headrace.envs.check import check_env
    from headrace.envs.gymnasium import Gymnasium

    checked = check_env(Gymnasium(given.env, **arguments), steps=given.steps, seed=given.seed)
    print(checked)
    return 0 if checked.ok else 1
