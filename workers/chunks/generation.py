"""From the rows of a chunk to its results, through a session on the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator

from storage.records import Chunk
from storage.retry import LOOK_SECONDS
from storage.spec import JobSpec
from workers.chunks.records import ResultWriter, error_of, result_of, results_of_rejected
from workers.engine.api.errors import EngineStopped
from workers.engine.api.request import Completion, FinishReason, Request
from workers.errors import EngineFailed
from workers.hosting.host import EngineHost, Session
from workers.rows.prepare import PreparedRow, Preparer, RejectedRow
from workers.rows.read import Row


class Generation:
    """Answers the rows of one chunk that have no record yet; every result goes to the writer.

    `check` is called all the time, and raises when the chunk has to end.
    """

    def __init__(
        self,
        spec: JobSpec,
        chunk: Chunk,
        recorded: Collection[tuple[int, int]],
        writer: ResultWriter,
        check: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._key = (chunk.id, chunk.epoch)
        self._job_id = chunk.job_id
        self._recorded = recorded
        self._writer = writer
        self._check = check
        self._open: dict[Hashable, tuple[Row, Request]] = {}

    def run(self, host: EngineHost, rows: Iterator[list[Row]]) -> None:
        """Returns when every row has its results. Raises `EngineFailed`, and what `check` and reading the rows raise;
        then what runs is aborted, and what finished before is with the writer."""
        requests = self._requests(host, rows)
        session = host.session()
        try:
            self._pump(session, requests)
        finally:
            for completion in session.close():
                self._record(completion)

    def run_one_by_one(self, host: EngineHost, rows: Iterator[list[Row]], take_in_hand: Callable[[Row], None]) -> None:
        """The same with a single row in the engine at a time, recorded before the next; `take_in_hand` is called with
        each before anything is done with it. A row that breaks the engine has that as its error."""
        for row in (row for batch in rows for row in batch if self._missing(row)):
            take_in_hand(row)
            try:
                self.run(host, iter([[row]]))
            except EngineFailed as error:
                self._answer_open(error)
                raise
            finally:
                self._writer.flush()

    def _answer_open(self, error: EngineFailed) -> None:
        """The engine broke under the only row that was in it."""
        for row, request in self._open.values():
            self._writer.add(error_of(row, request.sample, error.code, str(error)))
        self._open.clear()

    def _pump(self, session: Session, requests: Iterator[list[Request]]) -> None:
        """Keep the session full until every request is answered; record answers as they come."""
        ready: deque[Request] = deque()
        exhausted = False
        while True:
            self._check()
            while not exhausted and len(ready) < session.room:
                batch = next(requests, None)
                exhausted = batch is None
                ready.extend(batch or ())
            if ready and (session.room >= session.refill or not session.in_flight):
                session.send([ready.popleft() for _ in range(min(session.room, len(ready)))])
            if not session.in_flight:
                return
            for completion in session.receive(LOOK_SECONDS):
                if not self._record(completion):
                    raise EngineFailed(completion.error_message or "the engine aborted a request that nobody aborted")
            self._writer.flush_if_due()

    def _requests(self, host: EngineHost, rows: Iterator[list[Row]]) -> Iterator[list[Request]]:
        """Requests of the rows without a record, a batch of rows at a time; bad rows are recorded on the way."""
        preparer = Preparer(self._spec, host.config, host.tokenizer, host.max_model_len)
        for batch in rows:
            missing = {row.index: samples for row in batch if (samples := self._missing(row))}
            requests: list[Request] = []
            for prepared in preparer.prepare([row for row in batch if row.index in missing]):
                samples = missing[prepared.row.index]
                if isinstance(prepared, RejectedRow):
                    for result in results_of_rejected(prepared, samples):
                        self._writer.add(result)
                else:
                    requests.extend(self._opened(prepared, samples))
            self._writer.flush_if_due()
            yield requests

    def _opened(self, prepared: PreparedRow, samples: list[int]) -> list[Request]:
        requests = prepared.requests(self._key, samples, self._spec.seed, self._job_id)
        for request in requests:
            self._open[request.id] = (prepared.row, request)
        return requests

    def _missing(self, row: Row) -> list[int]:
        return [s for s in range(self._spec.num_samples) if (row.index, s) not in self._recorded]

    def _record(self, completion: Completion) -> bool:
        """Hand an answer to the writer; False when it is none (aborted, or the engine stopped)."""
        if completion.finish_reason is FinishReason.ABORT or completion.error_code == EngineStopped.code:
            return False
        row, request = self._open.pop(completion.request_id)
        self._writer.add(result_of(completion, row, request.params, keep_token_ids=self._spec.keep_token_ids))
        return True
