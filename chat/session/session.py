"""Keeps a chat with one model, in which the user can say, regenerate, edit, undo, branch and save.

Every call works the same way. The chat template renders the whole history. The text is tokenised, and compared token by
token with what the memory holds. The memory of the common beginning is reused, by rollback or from a checkpoint, and
all later tokens are fed. So it does not matter why a history differs: because the user edited it, or because the
template strips the thoughts of earlier replies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridmem.chat.engine.engine import Engine, Generation, Sampling, require_engine
from hybridmem.chat.engine.requests import GREEDY, check_max_tokens, read_stop
from hybridmem.chat.sampling.sampling import check_sampling
from hybridmem.chat.session.album import Album
from hybridmem.chat.session.history import (
    Rendering,
    Utterance,
    choose_marks,
    common_tokens,
    count_old,
    decode,
    encode_history,
    read_messages,
)
from hybridmem.chat.session.reuse import resume
from hybridmem.chat.session.saved import SavedSession, read_folder
from hybridmem.chat.session.tree import Tree, resume_together, save_together
from hybridmem.chat.session.turn import EDITED, NEW, explain
from hybridmem.chat.session.turn import Turn as Turn
from hybridmem.chat.special_tokens import PromptContext, Tokenizer, WrappedTokenizer
from hybridmem.chat.special_tokens.marks import mark_of, names_in
from hybridmem.memory import BatchError, FormatError, Sequence, SequenceError, SpecError, StepError
from hybridmem.memory.blocks import is_integer
from hybridmem.memory.sequences import Lease, uninterrupted, uninterrupted_call

if TYPE_CHECKING:
    from PIL.Image import Image

OnText = Callable[[str], None]


class ChatSession:
    """Holds one conversation.

    The messages define it; the live sequence only spares the model from computing them again.

    A call that fails leaves the messages as they were. Edits and regenerations return to checkpoints of the prefix
    cache, if the engine has one. Without a cache they return as far as the rollback window reaches, or else to the
    beginning.

    Calls wait for their reply and step the engine meanwhile, so other requests go on too. A session is used by one
    thread at a time; several sessions of one engine may be used by several threads.

    Args:
        engine: an engine with a tokenizer.
        system: the first message, if the template has such a role.
        messages: a history to begin with, oldest first: each an `Utterance`, or {"role": "user", "content": "Hello"} as
            OpenAI's clients write it.
        max_tokens, sampling, stop: the options of replies, as in `Engine.submit`. Each call may override them.
        parse_special: whether messages may contain special tokens. Otherwise these are plain text there, and no message
            can forge a turn.
        owner: the owner of what the prefix cache keeps of this session. Sessions of other owners do not find it; see
            `PrefixCache`.
        album: the pictures that `messages` name by their marks. None: there are none so far.
    Raises:
        SpecError: no engine. BatchError: wrong arguments. FormatError: no tokenizer, no chat template, or a template
        that refuses the messages.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        messages: Iterable[Utterance | Mapping[str, Any]] = (),
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop: str | Iterable[str] = (),
        owner: Hashable = None,
        parse_special: bool = False,
        album: Album | None = None,
    ) -> None:
        require_engine(engine, "ChatSession(engine)")
        if engine.tokenizer is None:
            raise FormatError("this engine has no tokenizer, so nothing can be said to it; make it with one")
        check_max_tokens(max_tokens)
        check_sampling(sampling)
        self.engine = engine
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.stop = read_stop(stop)
        self.owner = owner
        self.parse_special = parse_special
        self._album = Album(engine) if album is None else album
        self._tokenizer: Tokenizer = WrappedTokenizer(engine.tokenizer, PromptContext(pictures=self._album))
        first = [] if system is None else [Utterance("system", system)]
        self._messages: tuple[Utterance, ...] = (*first, *read_messages(messages))
        self._n_heard = 0  # This is how many messages the memory has held at most.
        self._live: Sequence | None = None
        self._tree: Tree = Tree()
        self._tree.add(self, None)
        self._is_closed = False
        self._answering = Lease()
        self._generation: Generation | None = None  # This is the generation of the latest reply.
        self._on_text: OnText | None = None  # This is the callback of the reply in progress.
        # This raises now if the template cannot be used at all.
        self._encode([*self._messages, Utterance("user", "?")])

    # The methods below talk to the model.

    @property
    def messages(self) -> tuple[Utterance, ...]:
        return self._messages

    @property
    def sequence(self) -> Sequence | None:
        """Return the live sequence, only to look at it; None if the memory holds nothing of this session.

        If you close it, the next call computes the history again.
        """
        return None if self._live is None or self._live.closed else self._live

    def say(
        self, text: str, *, max_tokens: int | None = None, sampling: Sampling | None = None,
        on_text: OnText | None = None, pictures: Iterable[bytes | str | Path | Image] = (),
    ) -> Turn:  # fmt: skip
        """Say something and get the reply.

        Args:
            pictures: the pictures before the text, as bytes or paths of files, or images of Pillow.
            on_text: is called with each piece of the reply. If it raises, the call ends with that error.
        Raises:
            BatchError: wrong arguments. CapacityError: no room. SequenceError: the session is closed. Whatever the
            model or `on_text` raises. UnsupportedModelError: the model takes no pictures. PictureError: one cannot be
            read. After an error the messages are as they were.
        """
        marks = [self._album.add(picture) for picture in pictures]
        new = [Utterance("user", "".join(marks) + _checked(text))]
        messages, turn = self._reply_to(NEW, len(self._messages), new, max_tokens, sampling, on_text)
        with uninterrupted_call(holds_all=True) as until_return:
            self._keep(messages)
        del until_return
        return turn

    def edit(
        self, index: int, text: str, *, max_tokens: int | None = None, sampling: Sampling | None = None,
        on_text: OnText | None = None, pictures: Iterable[bytes | str | Path | Image] | None = None,
    ) -> Turn:  # fmt: skip
        """Replace the text of `messages[index]`, forget what followed, and get the reply.

        Args:
            pictures: as for `say`. None: the message keeps its own.

        Raises as `say`. Raises BatchError if the message is not the user's.
        """
        users = [i for i, message in enumerate(self._messages) if message.role == "user"]
        if not is_integer(index) or index not in users:
            raise BatchError(
                f"message {index!r} is none of the user's; edit one of {', '.join(map(str, users)) or 'those to come'}"
            )
        own = map(mark_of, names_in(self._messages[index].content))
        marks = own if pictures is None else [self._album.add(picture) for picture in pictures]
        new = [Utterance("user", "".join(marks) + _checked(text))]
        messages, turn = self._reply_to(EDITED, index, new, max_tokens, sampling, on_text)
        with uninterrupted_call(holds_all=True) as until_return:
            self._keep(messages)
        del until_return
        return turn

    def regenerate(
        self, *, max_tokens: int | None = None, sampling: Sampling | None = None, on_text: OnText | None = None
    ) -> Turn:  # fmt: skip
        """Replace the last reply by another one. Raises as `say`.

        Greedy sampling, or the same seed, gives the same reply again.
        """
        self._check_exchange("regenerate")
        messages, turn = self._reply_to(NEW, len(self._messages) - 1, [], max_tokens, sampling, on_text)
        with uninterrupted_call(holds_all=True) as until_return:
            self._keep(messages)
        del until_return
        return turn

    def undo(self) -> tuple[Utterance, ...]:
        """Take back the user's last message and the reply, and return them.

        This computes nothing, and leads to no computation later.

        Raises BatchError if there is no such message.
        """
        self._check_exchange("undo")
        n_kept = max(i for i, message in enumerate(self._messages) if message.role == "user")
        undone, self._messages = self._messages[n_kept:], self._messages[:n_kept]
        self._n_heard = min(self._n_heard, n_kept)
        self._give_back()
        return undone

    def _give_back(self) -> None:
        """Roll back the tokens after the messages, if a rollback reaches that position.

        Otherwise the next call decides which tokens to reuse.
        """
        live, memory = self._live, self.engine.memory
        if live is None or live.is_swapped or not self._messages:
            return
        with self.engine.lock:
            n_said = self._n_said(live)
            if memory.can_rollback(live, n_said):
                memory.rollback(live, to=n_said)

    def _n_said(self, live: Sequence) -> int:
        """Count the leading tokens of the live sequence that belong to the messages.

        If the template cannot render these messages, all tokens count.
        """
        try:
            said = self._encode(self._messages, awaits_reply=False).token_ids if self._messages else []
        except FormatError:  # Some templates refuse a history without a message of the user.
            return live.length
        return common_tokens(live.tokens.tolist(), said)

    def branch(self) -> ChatSession:
        """Return another session with the same messages. Both share all memory until one of them is continued.

        Raises CapacityError if this session was swapped out (`sleep`) and there is no room to swap it in. Cost: no
        layer runs, and no tensor is copied.
        """
        self._check_free()
        options = {"max_tokens": self.max_tokens, "sampling": self.sampling, "stop": self.stop}
        also = {"owner": self.owner, "parse_special": self.parse_special, "album": self._album}
        other = ChatSession(self.engine, messages=self._messages, **options, **also)  # type: ignore[arg-type]
        other._n_heard = self._n_heard
        other._tree = self._tree
        with self.engine.lock:
            if self._live is not None:
                self.wake()
            with uninterrupted_call(holds_all=True) as _until_return:
                if self._live is not None:
                    other._live = self.engine.memory.fork(self._live)
                self._tree.add(other, self)
                return other

    @property
    def branches(self) -> tuple[ChatSession, ...]:
        """Return the other open sessions that grew from the same conversation, the oldest first."""
        return self._tree.others(self)

    # The methods below swap, save and close.

    def sleep(self) -> None:
        """Swap the session's memory out, to host memory or files. The next call swaps it in.

        Raises CapacityError if there is no room there. Blocks that prefixes or branches share with it stay in the
        budget.
        """
        self._check_free()
        with self.engine.lock:
            if self._live is not None and not self._live.is_swapped:
                self.engine.memory.swap_out(self._live)

    def wake(self) -> None:
        """Swap in the memory that `sleep` has swapped out.

        Raises CapacityError, or FormatError if the file is damaged. The memory stays swapped out then.
        """
        self._check_free()
        with self.engine.lock:
            if self._live is not None and self._live.is_swapped:
                self.engine.memory.swap_in(self._live)

    def save(self, folder: str | Path) -> None:
        """Write the messages and their memory to a folder, which `resume` reads in any process.

        All `branches` are saved with it, and so are the checkpoints of the prefix cache along their messages. Shared
        blocks are written once. A session that was saved there before is replaced only when the new one is complete.
        Tokens that were taken back, and are in no message, are not written.

        Raises OSError from the file system. Raises SpecError in a dry run, or if `folder` cannot be a folder.
        """
        self._check_free()
        with self.engine.lock:
            save_together([self, *self.branches], self._tree, read_folder(folder, SpecError))

    @staticmethod
    def resume(
        engine: Engine, folder: str | Path, *, owner: Hashable = None, parse_special: bool = False
    ) -> ChatSession:
        """Load the session that was saved in a folder.

        Its replies continue with the same bits; its `branches` are those saved with it.

        The engine's model, weights, tokenizer and memory must be like those that wrote it. `owner` and `parse_special`
        are not saved. If the memory of a branch is damaged, or there is no room for it, the branch is computed again
        when it goes on.

        Raises FormatError if there is no session, or a damaged or unsuitable one; nothing has changed then. Raises
        CapacityError.
        """
        require_engine(engine, "ChatSession.resume(engine, folder)")
        with engine.lock:

            def make(saved: SavedSession, album: Album) -> ChatSession:
                session = ChatSession(
                    engine, messages=saved.messages, max_tokens=saved.max_tokens, sampling=saved.sampling,
                    stop=saved.stop, owner=owner, parse_special=parse_special, album=album,
                )  # fmt: skip
                session._n_heard = saved.n_heard
                return session

            return resume_together(engine, read_folder(folder, FormatError), make)

    def close(self) -> None:
        """Free all memory. The messages can still be read. Closing again does nothing."""
        if self._is_closed:
            return
        self._check_free()
        with self.engine.lock, uninterrupted():
            if self._live is not None and not self._live.closed:
                self.engine.memory.close(self._live)
            self._live, self._is_closed = None, True
            self._tree.remove(self)

    def __enter__(self) -> ChatSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        live = self.sequence
        state = "closed" if self._is_closed else "nothing computed yet" if live is None else repr(live)
        return f"<ChatSession of {len(self._messages)} messages: {state}>"

    # The methods below make a reply.

    def _reply_to(
        self, why: str, n_kept: int, new: list[Utterance], max_tokens: int | None, sampling: Sampling | None,
        on_text: OnText | None
    ) -> tuple[tuple[Utterance, ...], Turn]:  # fmt: skip
        """Reply to the first `n_kept` messages and the `new` ones. Return all messages, and the turn.

        The session changes only when the caller keeps the returned messages. A Ctrl-C that comes while the caller does
        so is raised after the messages are kept.
        """
        self._check_free()
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        sampling = self.sampling if sampling is None else sampling
        check_max_tokens(max_tokens)
        check_sampling(sampling)
        if on_text is not None and not callable(on_text):
            raise BatchError(f"on_text={on_text!r}; give a function of a piece of text")
        prompt = self._encode(messages := (*self._messages[:n_kept], *new))
        n_heard, was_held = min(self._n_heard, n_kept), self._live is not None
        with self._answering:
            try:
                self._on_text = on_text
                with self.engine.lock, uninterrupted():
                    start = resume(self.engine, self._live, prompt.token_ids, self.owner)
                    self._live = start.sequence
                    self._album.hold(prompt.token_ids[start.n_kept :])
                    self._generation = generation = self.engine.submit(
                        prompt.token_ids[start.n_kept :],
                        sequence=start.sequence,
                        max_tokens=max_tokens,
                        sampling=sampling,
                        stop=self.stop,
                        marks=choose_marks(prompt, messages, start.n_kept),
                        keeps_sequence=True,
                        remembers_end=True,
                        on_token=self._hear,
                        owner=self.owner,
                    )
                while not generation.is_finished:
                    self.engine.step()
            finally:
                self._stop()
                self._album.rest()
        if generation.error is not None:
            raise generation.error
        reply = self._read_reply(generation)
        computed = explain(why, prompt, start, count_old(prompt, n_heard), was_held=was_held)
        reason = str(generation.finish_reason)
        turn = Turn(reply.content, tuple(generation.token_ids), reason, len(prompt.token_ids), start.n_kept, computed)
        return (*messages, reply), turn

    def _keep(self, messages: tuple[Utterance, ...]) -> None:
        self._messages, self._n_heard = messages, len(messages)

    def _encode(self, messages: Seq[Utterance], *, awaits_reply: bool = True) -> Rendering:
        return encode_history(self._tokenizer, messages, awaits_reply=awaits_reply, parse_special=self.parse_special)

    def _stop(self) -> None:
        """End the reply in progress, if there is one."""
        self._on_text = None
        if self._generation is not None and not self._generation.is_finished:
            with self.engine.lock:  # The lock makes sure that the reply has ended when this returns.
                self.engine.cancel(self._generation)
        self._generation = None

    def _hear(self, generation: Generation, piece: str) -> None:
        if piece and self._on_text is not None:
            self._on_text(piece)

    def _read_reply(self, generation: Generation) -> Utterance:
        """Return the reply as a message.

        If a stop string cut the reply inside a token, its token ids do not match the text. The text is tokenised again
        then.
        """
        if generation.stopped_by is not None:
            return Utterance("assistant", generation.text, tuple(generation.token_ids))
        ids = generation.token_ids
        has_end = generation.finish_reason == "stop" and bool(ids) and ids[-1] in self.engine.stop_ids
        words = ids[:-1] if has_end else ids
        return Utterance("assistant", decode(self._tokenizer, words), tuple(words))

    def _check_free(self) -> None:
        if self._is_closed:
            raise SequenceError("this session is closed; resume a saved one or begin another")
        if self._answering.is_taken:
            raise StepError("this session is in the middle of a reply; wait until it is complete")
        self._stop()  # A Ctrl-C may have kept an earlier call from stopping its reply.
        if self._live is not None and self._live.closed:
            self._live = None  # Somebody has closed the sequence. Its tokens are computed again.

    def _check_exchange(self, what: str) -> None:
        self._check_free()
        if [message.role for message in self._messages[-2:]] != ["user", "assistant"]:
            raise BatchError(
                f"there is nothing to {what}: the last two messages are no question and its reply; say something first"
            )


def _checked(text: str) -> str:
    if not isinstance(text, str):
        raise BatchError(f"{text!r} is no text; say a string")
    return text
