"""Hostile HTTP requests by class, made from a seed; and what an answer to any of them may look
like."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import io
import json
import pathlib
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nanovllm.server.protocol import (
    UNSUPPORTED,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

# How long to wait for an answer, and how long before the client closes its side of a request that
# is not complete.
ANSWER_SECONDS, PATIENCE = 120, 0.3
HELLO: Any = [{"role": "user", "content": "hello"}]
# A body that each route accepts, to begin with.
ROUTES: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/completions": ({"prompt": "abc", "max_tokens": 2}, CompletionRequest),
    "/v1/chat/completions": ({"messages": HELLO, "max_tokens": 2}, ChatCompletionRequest),
    "/tokenize": ({"prompt": "abc"}, TokenizeRequest),
    "/detokenize": ({"tokens": [1, 2]}, DetokenizeRequest),
}
# JSON, and what Python's parser takes for it. Each stands where a field has its value.
VALUES = (
    *(
        "null",
        "true",
        "false",
        "0",
        "-1",
        "1.5",
        "1.0",
        "5",
        '""',
        '"x"',
        '"5"',
        "[]",
        "{}",
        "[[]]",
        "[null]",
        '[1, "a"]',
    ),
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e308",
        "5e-324",
        "-0.0",
        "9" * 40,
        "-" + "9" * 40,
    ),
    *(
        "2147483648",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775809",
        "18446744073709551616",
    ),
    *(
        '"\\ud800"',
        '"\\udfff\\ud800"',
        '"\\u0000"',
        '"\\uffff\\ufffe"',
        '"\U0001f600"',
        '"' + "x" * 5000 + '"',
    ),
    *(
        '{"a": 1}',
        '{"": {}}',
        '{"1": 1e999}',
        '{"\\ud800": 1}',
        '{"-1": 1}',
        '{"__class__": "os.system"}',
        '[{"a": []}]',
    ),
    *(
        "[" * 60 + "]" * 60,
        '{"a":' * 60 + "1" + "}" * 60,
        '["\\ud800"]',
        "[1e999]",
        "[" + "9" * 40 + "]",
        '"../../etc/passwd"',
    ),
)
# Python refuses to read it, wherever it is.
TOO_LONG_NUMBER = "9" * 5000
DEPTHS = 100, 990, 5_000, 100_000
PATHS = (
    "/v1",
    "/v1/",
    "/v1/nothing",
    "/V1/COMPLETIONS",
    "/v1/completions/",
    "//v1/completions",
    "/v1/models/../completions",
    "/v1/models/%00",
    "/v1/models/%ff%fe",
    "/v1/models/" + "x" * 3000,
    "/v1/models/\u00e9",
    "/admin",
    "/debug",
    "/.env",
    "/.git/config",
    "/openapi.json/x",
    "/trace/x",
    "/trace?engine=-1",
    "/trace?engine=9",
    "/trace?engine=x",
    "/trace?engine=1e9",
    "/trace?engine=" + "9" * 5000,
    "/health?" + "a=b&" * 500,
    "/%",
    "/%zz",
    "/;",
    "/?",
    "/metrics/%2e%2e/",
    "*",
    "x",
    "http://",
    "http://127.0.0.1:1/v1/models",
    "http://evil.example/v1/completions",
)
TRAVERSALS = (
    "../index.html",
    "..%2findex.html",
    "%2e%2e%2f%2e%2e%2fpage.py",
    "..%5c..%5cpage.py",
    "....//page.py",
    "%252e%252e%252fpage.py",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "../../../../../../etc/passwd",
    "..%c0%af..%c0%afetc/passwd",
    ".env",
    "..",
    ".",
    "",
    "%00",
    "index.html%00.js",
    "index.html/../../page.py",
    "x" * 3000 + ".js",
    "app.js.map",
    "~root",
    "page.py",
    "__init__.py",
    "file:///etc/passwd",
    "live.js?../../page.py",
)
METHODS = (
    "DELETE",
    "PUT",
    "PATCH",
    "OPTIONS",
    "HEAD",
    "TRACE",
    "PROPFIND",
    "GET",
    "POST",
    "get",
    "X" * 300,
    "BREW",
    "G\x00T",
    "CONNECT",
)


@dataclass
class Attack:
    """One hostile request.

    Attributes:
        data: its bytes, from the request line on.
        field: the field of a JSON body that is wrong, if it is one.
        ends_early: the client closes its side before it has sent what it announced; it may get no
            answer.
        is_http: whether a parser of HTTP has to accept it. That parser's refusal is not JSON, and
            does not arrive if the server closes the connection before it has read everything.
    """

    data: bytes
    field: str = ""
    ends_early: bool = False
    is_http: bool = True


@dataclass
class Attacker:
    """Makes attacks.

    Args:
        rng: where all choices come from.
        host: for the header.
        canary: a file that does not exist. Some attacks try to make the server create it.
        key: sent as API key, if any.
    """

    rng: random.Random
    host: str
    canary: pathlib.Path
    key: str = ""

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *headers: str,
        kind: str = "application/json",
    ) -> bytes:
        """A well-formed request."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Connection: close", *headers]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        if kind:
            lines.append(f"Content-Type: {kind}")
        if body or method == "POST":
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body

    def post(
        self, body: bytes | str, path: str = "", *headers: str, kind: str = "application/json"
    ) -> bytes:
        """A body for any of the routes."""
        raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
        return self.request("POST", path or self.route(), raw, *headers, kind=kind)

    def route(self) -> str:
        return self.rng.choice(list(ROUTES))

    def valid(self, path: str = "") -> str:
        """The text of a body that could be right."""
        return json.dumps(ROUTES[path or self.route()][0])

    # --------------------------------------------------------------------------- classes of attacks

    def malformed_json(self) -> Attack:
        """A valid body with bytes changed, removed, added or repeated."""
        path = self.route()
        raw = bytearray(self.valid(path).encode())
        for _ in range(self.rng.randint(1, 4)):
            i, j = sorted(self.rng.choices(range(len(raw) + 1), k=2))
            piece = (
                self.rng.randbytes(self.rng.randint(0, 4))
                if self.rng.random() < 0.5
                else b'{}[]",:\\\x00'
            )
            raw[i : self.rng.choice([i, i + 1, j])] = self.rng.choice([b"", piece, raw[i:j] * 2])
        return Attack(self.post(bytes(raw), path))

    def wrong_value(self) -> Attack:
        """One field of a valid body has a value that it should not have."""
        path = self.route()
        body, model = ROUTES[path]
        name = self.rng.choice(
            [*model.model_fields, *model.model_fields, *UNSUPPORTED, "user", "metadata"]
        )
        body = {key: value for key, value in body.items() if key != name}
        value = self.rng.choice(VALUES)
        fields = [
            *(f'"{key}": {json.dumps(right)}' for key, right in body.items()),
            f'"{name}": {value}',
        ]
        return Attack(self.post("{" + ", ".join(fields) + "}", path), field=name)

    def wrong_values(self) -> Attack:
        """Several fields at once, which may contradict one another."""
        path = self.route()
        body, model = ROUTES[path]
        names = self.rng.choices([*model.model_fields], k=self.rng.randint(2, 12))
        fields = [f'"{name}": {self.rng.choice([*VALUES, TOO_LONG_NUMBER])}' for name in names]
        return Attack(self.post("{" + ", ".join([*fields, json.dumps(body)[1:-1]]) + "}", path))

    def nested(self) -> Attack:
        """Brackets within brackets."""
        depth, path = self.rng.choice(DEPTHS), self.route()
        opening, closing = self.rng.choice(
            [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ('{"messages":[', "]}")]
        )
        deep = opening * depth + "1" + (closing * depth if self.rng.random() < 0.7 else "")
        name = self.rng.choice([*ROUTES[path][1].model_fields, "unknown"])
        return Attack(self.post(self.rng.choice([deep, f'{{"{name}": {deep}}}']), path))

    def unknown_or_twice(self) -> Attack:
        """Unknown fields, many fields, and fields that are there twice."""
        path = self.route()
        inner = self.valid(path)[1:-1]
        extra = self.rng.choice(
            [
                f'"{self.rng.randbytes(8).hex()}": {self.rng.choice(VALUES)}',
                ", ".join(f'"f{i}": {i}' for i in range(2000)),
                f"{inner}, {inner}",
                f'"prompt": {self.rng.choice(VALUES)}, "prompt": "abc"',
                '"__proto__": {"a": 1}, "constructor": {}, "__init__": 1, "self": 1, "cls": 2',
                (
                    '"model_config": {}, "model_extra": {}, "model_fields": 1, "sampling_params":'
                    ' "x", "PASSED_ON": []'
                ),
                f'"{"n" * 100_000}": 1',
                '"\\ud800": 1',
                '"": ""',
            ]
        )
        return Attack(
            self.post("{" + self.rng.choice([f"{inner}, {extra}", f"{extra}, {inner}"]) + "}", path)
        )

    def content_type(self) -> Attack:
        """Another type or encoding than the body's, and other encodings."""
        path = self.route()
        text = self.valid(path)
        raw = self.rng.choice(
            [text.encode(code) for code in ("utf-8", "utf-16", "utf-32-be", "utf-8-sig", "utf-7")]
        )
        raw = self.rng.choice([raw, raw, gzip.compress(raw), gzip.compress(b" " * 2**20)])
        kinds = (
            "",
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/xml",
        )
        odd = (
            "application/json; charset=utf-16",
            "application/vnd.api+json",
            "application/json, text/html",
            "x" * 5000,
            "/",
        )
        headers = (
            "Content-Encoding: gzip",
            "Content-Encoding: br",
            "Transfer-Encoding: identity",
            "Accept: */*",
            "Accept-Encoding: x",
        )
        kind = self.rng.choice([*kinds, *odd, "application/json"])
        return Attack(self.post(raw, path, self.rng.choice(headers), kind=kind), is_http=False)

    def broken_text(self) -> Attack:
        """Bytes that are no UTF-8, and halves of surrogate pairs, in any string."""
        path = self.route()
        words = (
            b"\xff\xfe",
            b"\xc0\x80",
            b"\xed\xa0\x80",
            b"\xf5\x80\x80\x80",
            b"\x80",
            b"\\ud800",
            b"\\udc00\\ud800",
            b"\\u0000",
            b"\x00",
        )
        word = self.rng.choice(words)
        for old in (b"abc", b"hello", b"prompt", b"[1, 2]"):
            if old in (raw := self.valid(path).encode()):
                new = word if old != b"[1, 2]" else b'["' + word + b'"]'
                return Attack(self.post(raw.replace(old, new), path))
        raise AssertionError(path)

    def code(self) -> Attack:
        """Text that some parser, template or shell might run: it would create the canary."""
        touch = f"touch {self.canary}"
        texts = (
            f"{{{{ cycler.__init__.__globals__.os.system('{touch}') }}}}",
            (
                f"{{% for c in ().__class__.__base__.__subclasses__() %}}{{{{ c('{touch}', "
                "shell=True) }}{% endfor %}"
            ),
            f"$({touch})",
            f"`{touch}`",
            f"; {touch} ;",
            f"| {touch}",
            f"!!python/object/apply:os.system ['{touch}']",
            f"__import__('os').system('{touch}')",
            "{0.__class__.__init__.__globals__}",
            "%(x)s %s %n",
            "${jndi:ldap://127.0.0.1/a}",
        )
        text, path = self.rng.choice(texts), self.route()
        if self.rng.random() < 0.2:
            payload = pickle.dumps(
                type(
                    "Run",
                    (),
                    {"__reduce__": lambda _: (exec, (f"open({str(self.canary)!r}, 'w')",))},
                )()
            )
            return Attack(self.post(payload, path, kind="application/python-pickle"))
        names = (
            "prompt",
            "stop",
            "model",
            "user",
            "chat_template",
            "guided_regex",
            "cache_salt",
            "kv_transfer_params",
        )
        body = ROUTES[path][0] | {self.rng.choice(names): text}
        if "messages" in body:
            more = (
                {"messages": [{"role": "user", "content": text}]},
                {"chat_template_kwargs": {"x": text, "chat_template": text}},
            )
            body |= self.rng.choice([{}, *more])
        return Attack(self.post(json.dumps(body), path))

    def chunked(self) -> Attack:
        """Chunks that lie about their size, or never end."""
        head = self.request("POST", self.route(), b"", "Transfer-Encoding: chunked")
        head = head.replace(b"Content-Length: 0\r\n", b"")
        chunks = (
            b'5\r\n{"pro',
            b"ffffffffffffffffffff\r\n{}",
            b"-5\r\n{}\r\n0\r\n\r\n",
            b"2\r\n{}",
            b"2\r\n{}\r\n",
            b"zz\r\n{}\r\n0\r\n\r\n",
            b"2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
            b"0x2\r\n{}\r\n0\r\n\r\n",
            b"1\r\n{}\r\n0\r\n\r\n",
            b"0\r\n\r\n",
            b"\r\n\r\n",
            b"2\n{}\n0\n\n",
            b"2\r\n{}\r\n0\r\nContent-Length: 5\r\n\r\n",
            b"1\r\n{\r\n" * 5000,
        )
        return Attack(head + self.rng.choice(chunks), ends_early=True, is_http=False)

    def smuggled(self) -> Attack:
        """Two parsers could see different requests in it."""
        body = self.valid("/v1/completions").encode()
        inner = b"GET /admin HTTP/1.1\r\nHost: x\r\n\r\n"
        headers = (
            ["Content-Length: 5"],
            ["Content-Length: 0"],
            ["Transfer-Encoding: chunked"],
            ["Transfer-Encoding: xchunked"],
            ["Transfer-Encoding: identity, chunked"],
            ["Transfer-Encoding: chunked", "Transfer-Encoding: x"],
            ["Content-Length: -1"],
            ["Content-Length: +5"],
            ["Content-Length: 1e3"],
            ["Content-Length: 9" + "9" * 30],
            ["Content-Length : 5"],
            [" Content-Length: 5"],
            ["Transfer-Encoding : chunked"],
            ["X: y\nContent-Length: 0"],
            ["X: y\rZ: 1"],
            ["Host: evil.example"],
            ["X-Forwarded-For: 1.2.3.4", "X-Forwarded-Host: evil"],
            ["Upgrade: h2c", "Connection: upgrade, HTTP2-Settings"],
            [
                "Upgrade: websocket",
                "Connection: Upgrade",
                "Sec-WebSocket-Key: x",
                "Sec-WebSocket-Version: 13",
            ],
            ["Expect: 100-continue"],
            ["Expect: 200-maybe"],
        )
        data = self.request("POST", "/v1/completions", body, *self.rng.choice(headers))
        return Attack(data + self.rng.choice([b"", inner]), ends_early=True, is_http=False)

    def header(self) -> Attack:
        """Headers that are too many, too long, or no headers."""
        long = self.rng.choice([1000, 70_000, 1_000_000])
        lines = (
            ["X: " + "x" * long],
            [f"X{i}: {i}" for i in range(self.rng.choice([50, 5000]))],
            ["x" * long + ": 1"],
            ["Cookie: " + "a=b; " * 1000],
            ["Authorization: Bearer " + "x" * long],
            ["Authorization: Basic Og=="],
            ["Authorization: Bearer"],
            ["Authorization: \u00e9\u0000"],
            ["X: \x00"],
            ["\x00: y"],
            ["no colon"],
            [": empty"],
            ["X:"],
            ["X: \udcff\udcfe"],
            ["Range: bytes=0-5,-1,9-"],
            ["If-None-Match: *"],
            ["Accept: " + "a/b," * 1000],
            ["Origin: null"],
            ["X-Request-Id: " + "x" * 5000],
            ["X-HTTP-Method-Override: DELETE"],
        )
        path = self.rng.choice(["/health", "/v1/models", "/", "/metrics"])
        return Attack(self.request("GET", path, b"", *self.rng.choice(lines)), is_http=False)

    def path(self) -> Attack:
        """Paths that are no routes, and methods that they do not have."""
        path, method = self.rng.choice(PATHS), self.rng.choice(["GET", "POST", "GET", *METHODS])
        if self.rng.random() < 0.5:
            path, method = (
                self.rng.choice([*ROUTES, "/", "/health", "/metrics", "/v1/models"]),
                self.rng.choice(METHODS),
            )
        return Attack(self.request(method, path), is_http=False)

    def traversal(self) -> Attack:
        """Files that are not the page's."""
        return Attack(self.request("GET", "/web/" + self.rng.choice(TRAVERSALS)), is_http=False)

    def no_http(self) -> Attack:
        """Other protocols, and noise."""
        noise = (
            self.rng.randbytes(self.rng.randint(1, 5000)),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.rng.randbytes(500),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /\r\n\r\n",
            b"\r\n" * 1000,
            b"GET / HTTP/1.0\r\n\r\n",
            b"*1\r\n$4\r\nPING\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"SSH-2.0-x\r\n",
            b"",
            b"\x00" * 70_000,
            b"A" * 200_000,
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 300,
        )
        return Attack(self.rng.choice(noise), ends_early=True, is_http=False)

    def large(self) -> Attack:
        """Much work for one request: long prompts, many prompts, many answers, many conditions."""
        bodies = (
            {"prompt": "x" * self.rng.choice([255, 256, 1000, 200_000])},
            {"prompt": "abc", "n": 128},
            {"prompt": ["a"] * 1024, "max_tokens": 1},
            {"prompt": ["a"] * 3000},
            {"prompt": [1] * 100_000},
            {"prompt": "abc", "logit_bias": {str(i): 1 for i in range(320)}},
            {"prompt": "abc", "stop": ["x" * 1000] * 16, "max_tokens": 200},
            {"prompt": "abc", "logprobs": 20, "n": 16, "best_of": 16},
            {"prompt": "a" * 200, "echo": True, "logprobs": 20, "prompt_logprobs": 20, "n": 4},
            {"prompt": "abc", "stop_token_ids": [1] * 1025},
        )
        return Attack(self.post(json.dumps(self.rng.choice(bodies)), "/v1/completions"))


CLASSES: dict[str, Callable[[Attacker], Attack]] = {
    each.__name__: each
    for each in (
        Attacker.malformed_json,
        Attacker.wrong_value,
        Attacker.wrong_values,
        Attacker.nested,
        Attacker.unknown_or_twice,
        Attacker.content_type,
        Attacker.broken_text,
        Attacker.code,
        Attacker.chunked,
        Attacker.smuggled,
        Attacker.header,
        Attacker.path,
        Attacker.traversal,
        Attacker.no_http,
        Attacker.large,
    )
}


@dataclass
class Answer:
    """What a server has sent until it closed the connection: no status means nothing."""

    status: int = 0
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


async def send(host: str, port: int, attack: Attack) -> Answer:
    """Make an attack.

    Raises:
        TimeoutError: the server neither answers nor closes the connection.
    """
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(attack.data)
            await writer.drain()
            received = b""
            if attack.ends_early:
                with contextlib.suppress(TimeoutError):
                    received = await asyncio.wait_for(reader.read(1), PATIENCE)
                writer.write_eof()
            received += await reader.read(-1)
        except OSError:  # the server has closed the connection before it had read everything
            return Answer()
        finally:
            writer.close()
    return parse_answer(received, attack)


class _Received(io.BytesIO):
    def makefile(self, mode: str) -> _Received:
        return self


def parse_answer(received: bytes, attack: Attack) -> Answer:
    """The first answer in what was received."""
    if not received:
        return Answer()
    method = attack.data.split(b" ", 1)[0].decode("latin-1")
    response = http.client.HTTPResponse(_Received(received), method=method)  # type: ignore[arg-type]
    try:
        response.begin()
        content = response.read()
    except http.client.RemoteDisconnected:  # nothing but "100 Continue"
        return Answer()
    except http.client.IncompleteRead as error:
        if attack.is_http:
            raise
        content = error.partial
    return Answer(
        response.status, content, {name.lower(): value for name, value in response.getheaders()}
    )


def what_is_wrong(attack: Attack, answer: Answer) -> str:
    """Why this is no proper answer; "" if it is one."""
    if answer.status == 0:
        return "" if attack.ends_early or not attack.is_http else "no answer"
    if answer.status < 400:
        return ""
    if answer.status >= 500 and answer.status != 503:
        return "a server error"
    if attack.data.startswith(b"HEAD "):
        return ""
    if (
        not attack.is_http
        and answer.status == 400
        and answer.headers["content-type"].startswith("text/plain")
    ):
        return ""  # uvicorn's own answer to what is not HTTP
    try:
        error = msgspec.json.decode(answer.content)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return "an error without OpenAI's shape"
    if (
        set(error) != {"message", "type", "param", "code"}
        or not error["message"]
        or len(error["message"]) > 2000
    ):
        return "an error without OpenAI's fields"
    named = error["param"] == attack.field or attack.field in error["message"]
    if "not valid JSON" in error["message"]:
        if b"Transfer-Encoding: chunked" in attack.data:
            return ""  # what follows the headers are chunks: the body is in them
        # The router takes none of Python's additions, such as NaN.
        with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
            msgspec.json.decode(attack.data.partition(b"\r\n\r\n")[2])
            return "a valid body is called invalid"
        named = True
    return "" if named or answer.status != 400 else f"the error does not name {attack.field!r}"


def attacks(attacker: Attacker, per_class: int) -> Iterator[tuple[str, Attack]]:
    """Attacks of all classes, mixed."""
    names = list(CLASSES) * per_class
    attacker.rng.shuffle(names)
    return ((name, CLASSES[name](attacker)) for name in names)
