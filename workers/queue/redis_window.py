"""On Redis an acknowledgement that fails gives its place in the prefetch window back.

Kombu 5.7 keeps the place, and asks Redis for no more messages while none is free. A worker all of whose
acknowledgements met a broken connection would wait for ever, without a look at the connection, although the broker is
back.
"""

from __future__ import annotations

from kombu.transport import redis, virtual


class _Window(redis.QoS):  # type: ignore[misc]
    def ack(self, delivery_tag: str) -> None:
        try:
            super().ack(delivery_tag)
        except BaseException:
            virtual.QoS.ack(self, delivery_tag)
            raise


def mend_window() -> None:
    """Make every Redis connection of this process do so."""
    redis.Channel.QoS = _Window
