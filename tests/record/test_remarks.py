"""What the library logs while a run goes on is said to whoever follows it."""

from __future__ import annotations

import logging

from headrace.record.remarks import Remarks


def test_lines_are_said_while_the_with_block_lasts() -> None:
    said: list[str] = []
    logger, before = logging.getLogger("headrace.place"), logging.getLogger("headrace").level
    with Remarks(said.append):
        logger.info("waiting for data for %.0f s", 30.0)
        logger.debug("nothing for users")
        logging.getLogger("other").warning("nothing of ours")
    logger.info("nobody follows any more")
    assert said == ["waiting for data for 30 s"]
    assert logging.getLogger("headrace").level == before
