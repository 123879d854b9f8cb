"""No secret of a URL is shown or logged, whatever its form."""

from __future__ import annotations

import io
import logging

import pytest

from storage.errors import InvalidStore, StorageError
from storage.redaction import redact_logs, redacted
from storage.store.store import Store
from storage.wire import UnsupportedBroker, broker_settings

URLS = [
    "postgresql://u:SESAME@h/db",
    "postgresql+psycopg://u:SES%41ME@h:5432/db?sslmode=require",
    "postgresql://u:SES@AME@h/db",
    "postgresql://u:SES/AME@h/db",
    "postgresql://u:SES:AME@h:5432/db",
    "postgresql://u:SESAME@h1,h2:5433/db",
    "postgresql://u@h/db?password=SESAME",
    "postgresql://u@h/db?pass%77ord=SESAME&x=1",
    "postgresql://u@h/db?x=1&sslpassword=SESAME",
    "postgresql:///db?host=/tmp&user=u&password=SESAME",
    "host=h user=u password=SESAME dbname=db",
    "host=h user=u password='SES AME' dbname=db",
    "redis://:SESAME@h/0",
    "redis://h/0?password=SESAME",
    "redis://:SESAME@h1/0;redis://:SESAME@h2/0",
    "redis://:SES;AME@h1/0;redis://u:SESAME@h2/0?ssl_keyfile=/etc/key",
    "redis://h1/0?password=SES;AME;redis://:SESAME@h2/0",
    "amqps://u:SESAME@h//",
    "s3://KEY:SESAME@bucket/prompts.parquet",
    "https://h/prompts.parquet?X-Amz-Signature=SESAME",
    "https://h/prompts.parquet?sv=1&sig=SESAME&se=2",
    "abfs://h/p?account_key=SESAME",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("sentence", ["{}", "cannot read '{}': no", "tried ({}), and {}"])
def test_no_part_of_a_secret_is_left(url: str, sentence: str) -> None:
    shown = redacted(sentence.replace("{}", url))
    assert not [part for part in ("SES", "AME", "%41ME") if part in shown], shown
    assert "***" in shown
    assert shown.startswith(sentence.partition("{}")[0])


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u@h:5432/db?sslmode=require&passfile=/home/u/.pgpass&sslkey=/etc/key",
        "redis://h:6379/0?queue=team-a",
        "file:///data/a@b.parquet",
        "max_tokens=5, bypass = yes: a@b.c",
        "sqlite:///nightdraft.db",
    ],
)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert redacted(text) == text


def test_what_a_driver_quotes_is_hidden_as_well() -> None:
    url = "postgresql://u:open%40sesame@h/db"
    assert redacted("failed to resolve host 'sesame@h', tried open@sesame", url) == (
        "failed to resolve host '***@h', tried ***"
    )


def test_logs_and_tracebacks_have_none() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    redact_logs([handler])
    redact_logs([handler])
    try:
        raise ValueError(URLS[0])
    except ValueError as error:
        handler.handle(
            logging.LogRecord("n", logging.ERROR, "", 0, "%s", (URLS[6],), (ValueError, error, error.__traceback__))
        )
    assert "ERROR postgresql://u@h/db?password=***" in stream.getvalue()
    assert "ValueError: postgresql://u:***@h/db" in stream.getvalue()
    assert "SESAME" not in stream.getvalue()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://u:SESAME@h:abc/db", "the port is not a number"),
        ("postgresql://u:SESAME@h:99999/db", "the port is not a number"),
        ("postgresql://u:SES@SESAME@h/db", "an @ in the host"),
        ("mysql://u:SESAME@h/db?password=SESAME", "SQLite or PostgreSQL"),
        ("store.db", "not a store URL"),
        ("postgresql://u:SESAME@127.0.0.1:1/db?password=SESAME", "does not answer"),
        ("postgresql://u@127.0.0.1:1/db?password=SESAME", "does not answer"),
        ("postgresql://u@127.0.0.1:5432/db?connect_timeout=x&password=SESAME", "connect_timeout"),
    ],
)
def test_a_wrong_store_url_is_one_sentence(url: str, says: str) -> None:
    with pytest.raises(StorageError, match=says) as caught:
        Store.open(url, patience=0.1)
    assert "SESAME" not in str(caught.value)
    if "does not answer" not in says and "connect" not in says:
        assert isinstance(caught.value, InvalidStore)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h:abc/0", "the port is not a number"),
        ("redis://:SES/SESAME@h/0", "the port is not a number"),
        ("redis://:A@h:6379/0;redis://:SESAME@h:99999/0", "the port is not a number"),
        ("redis://h/0?password=SESAME", "://USER:PASSWORD@HOST"),
        ("amqp://u:SESAME@h//?foo=1", "unknown parameter 'foo'"),
        ("redis://h/zero", "the database's number"),
        ("redis://h1/0?queue=a;redis://h2/0?queue=b", "several queues: a, b"),
        ("redis://h/0?queue=a b", "queue name 'a b'"),
    ],
)
def test_a_wrong_broker_url_is_one_sentence(url: str, says: str) -> None:
    with pytest.raises(UnsupportedBroker) as caught:
        broker_settings(url)
    assert says in str(caught.value)
    assert "SESAME" not in str(caught.value)


def test_a_list_of_brokers_names_its_queue_anywhere() -> None:
    for url in ("redis://:a;b@h1/0?queue=q;redis://h2:1/0", "redis://:a;b@h1/0;redis://h2:1/0?queue=q"):
        settings = broker_settings(url)
        assert (settings["broker_url"], settings["task_default_queue"]) == ("redis://:a;b@h1/0;redis://h2:1/0", "q")
