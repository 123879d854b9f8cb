"""What a worker makes of a message before Celery sees it: the three fields of a hint, or nothing.

A queue may hold anything: other programs share brokers, and people put messages in by hand. Celery passes much of what
is wrong with a message on as an exception of its event loop, which ends the worker before the message is acknowledged;
the next worker takes it, and ends as well. So every message is read here first. One that is no hint of ours is logged
and dropped; of one that is, nothing else is taken over: no reply address, no delay, no follow-up task.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable
from functools import wraps
from typing import Any

from amqp.basic_message import Message
from celery.worker.consumer import Consumer
from kombu import compression
from kombu.transport import redis
from kombu.utils.json import dumps

from storage.records import ChunkMessage
from storage.wire import TASK_NAME

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 10
"""A hint has about a hundred."""
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError)
"""What comes of bytes that are not what kombu expects. Errors of the connection are none of these."""
_SHOWN = 200
"""Characters of a dropped message in the log."""


class NoHint(Exception):
    """The message does not say which chunk is meant."""


def hint_of(message: Any) -> ChunkMessage:
    """The chunk that a message of kombu's names. Raises `NoHint`, whatever is wrong with it."""
    try:
        return _hint(message)
    except NoHint:
        raise
    except Exception as error:
        raise NoHint(f"it cannot be decoded: {type(error).__name__}: {error}") from error


def _hint(message: Any) -> ChunkMessage:
    task = message.headers.get("task")
    if task != TASK_NAME:
        raise NoHint(f"its task is {_shown(task)}, not {TASK_NAME}")
    if len(message.body) > MAX_BODY_BYTES:
        raise NoHint(f"it has {len(message.body)} bytes")
    arguments, fields, _ = message.decode()
    if arguments or set(fields) != {"job_id", "chunk_id", "epoch"}:
        raise NoHint("its arguments are not job_id, chunk_id and epoch")
    hint = ChunkMessage(**fields)
    numbers = ((hint.chunk_id, 2**63), (hint.epoch, 2**31))
    if not all(type(number) is int and 0 <= number < end for number, end in numbers):
        raise NoHint("chunk_id and epoch have to be whole numbers that the store can hold")
    if type(hint.job_id) is not str or not re.fullmatch(r"[\w.-]{1,200}", hint.job_id):
        raise NoHint("job_id has to be the id of a job")
    return hint


class HintConsumer(Consumer):  # type: ignore[misc]
    """Celery's consumer behind `hint_of`."""

    def create_task_handler(self, *arguments: Any, **options: Any) -> Callable[[Any], None]:
        celery_handler = super().create_task_handler(*arguments, **options)

        def on_message(message: Any) -> None:
            try:
                rewrite(message, hint_of(message))
                celery_handler(message)
            except self.connection_errors:
                raise
            except Exception as error:
                self._drop(message, error)

        return on_message

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Of kombu, for what it could not even unpack."""
        self._drop(message, exc)

    def _drop(self, message: Any, error: Exception) -> None:
        log.error(
            "a message that is no chunk of ours was dropped: %s; headers %s, body %s",
            error,
            _shown(message.headers),
            _shown(message.body),
        )
        if not message.acknowledged:
            message.ack_log_error(log, self.connection_errors)


def rewrite(message: Any, hint: ChunkMessage) -> None:
    """Leave of a message what the scheduler would have written."""
    fields = {"job_id": hint.job_id, "chunk_id": hint.chunk_id, "epoch": hint.epoch}
    given = message.headers.get("id")
    message.headers = {
        "task": TASK_NAME,
        "id": given if isinstance(given, str) and 0 < len(given) <= 64 else str(uuid.uuid4()),
        "argsrepr": "()",
        "kwargsrepr": repr(fields),
    }
    message.properties = {}
    message.body = dumps([[], fields, {}]).encode()
    message.content_type, message.content_encoding = "application/json", "utf-8"
    message._decoded_cache = None


def harden_transports() -> None:
    """What fails below Celery's consumer, where a message is not one yet: in every connection of this process.

    Bodies are never unpacked (a few kilobytes can be gigabytes; the scheduler compresses nothing). Redis: what is in
    the list but is no message of kombu's is dropped. RabbitMQ: properties that cannot be read are left out.
    """
    for content_type in compression.encoders():
        compression.register(None, _refuse_compressed, content_type)
    if not hasattr(redis.Channel._brpop_read, "__wrapped__"):
        redis.Channel._brpop_read = _dropping(redis.Channel._brpop_read)
        Message._load_properties = _lenient(Message._load_properties)


def _refuse_compressed(body: bytes) -> bytes:
    raise NoHint("its body is compressed")


def _dropping(read: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(read)
    def read_or_drop(channel: Any, **options: Any) -> Any:
        try:
            return read(channel, **options)
        except _UNREADABLE as error:
            log.error("what the queue held is no message and was dropped: %s: %s", type(error).__name__, error)
            return True

    return read_or_drop


def _lenient(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def load_or_none(message: Any, class_id: int, buffer: Any, offset: int) -> Any:
        try:
            return load(message, class_id, buffer, offset)
        except Exception as error:
            log.error("a message whose properties cannot be read: %s: %s", type(error).__name__, error)
            message.properties = {}
            return offset

    return load_or_none


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
