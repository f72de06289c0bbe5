"""The size of JSON in values, because the time to parse it depends on them; counted as it arrives. Looks for NUL too."""

from __future__ import annotations

from starlette.exceptions import HTTPException

MOST_VALUES, MOST_TEXTS, MOST_CONTAINERS = 2**15, 5 * 2**12, 2**13
"""Limits for JSON, parsed and checked in under 20 ms: values of any kind; texts, including field names; lists and objects."""
MOST_NUMBERS = 200_000 + 2**10
"""Limit of values where prompts are sent as token ids."""
MOST_VALUES_OF_NOBODY = 2**10
"""Limit of values before the key is checked."""
VALUES_OF_A_REQUEST, TEXTS_OF_A_REQUEST, CONTAINERS_OF_A_REQUEST, BYTES_OF_A_REQUEST = 2**13, 2**12, 2**10, 2**17
"""Values, texts, containers, or bytes of a body that count as one request. A megabyte takes 13 ms of the event loop."""
NO_KEY = "give an API key that is good: Authorization: Bearer mk-…"


_NUL = rb"\u0000"


class JsonSize:
    """Counts JSON values in UTF-8 as they arrive, ignoring the characters inside texts."""

    def __init__(self, most: int = MOST_VALUES, texts: int = MOST_TEXTS) -> None:
        self._most, self._texts = most, texts
        self.values = self._bytes = self._quotes = self._containers = 0
        self.has_nul = False
        """Whether a text or a field's name has a NUL character, which no database keeps."""
        self._rest = b""
        """The end of the last part, where an escape is not whole."""

    @property
    def requests(self) -> float:
        """How many requests this counts as."""
        parts = self._quotes / 2 / TEXTS_OF_A_REQUEST, self._containers / CONTAINERS_OF_A_REQUEST
        return max(*parts, self.values / VALUES_OF_A_REQUEST, self._bytes / BYTES_OF_A_REQUEST)

    def add(self, part: bytes) -> None:
        """Count another part. Raises HTTPException if it has too many values, or is not UTF-8."""
        self._bytes += len(part)
        if b"\0" in part:  # as in UTF-16, where any byte may look like a quote
            raise HTTPException(400, "a JSON body has no NUL bytes; send it in UTF-8")
        part = (self._rest + part).replace(b"\\\\", b"")
        tail = part[part.rfind(b"\\", -len(_NUL) + 1) :]
        self._rest = tail if tail and _NUL.startswith(tail) else b""
        self.has_nul = self.has_nul or _NUL in part
        pieces = part.removesuffix(self._rest).replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[self._quotes % 2 :: 2])
        self._quotes += len(pieces) - 1
        containers = outside.count(b"[") + outside.count(b"{")
        self._containers += containers
        self.values += containers + outside.count(b",")
        for what, count, most in (
            ("values", self.values, self._most),
            ("texts", self._quotes // 2, self._texts),
            ("lists and objects", self._containers, MOST_CONTAINERS),
        ):
            if count > most and self._most == MOST_VALUES_OF_NOBODY:
                raise HTTPException(401, NO_KEY)
            if count > most:
                raise HTTPException(413, f"this request may have {most} {what} at most; send it in parts")
