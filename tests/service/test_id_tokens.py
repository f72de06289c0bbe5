"""ID tokens and documents that a provider should not send: each is refused, and asking for them has limits."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import RSAAlgorithm

from motet.config.jobfile import load_service
from motet.config.service import OidcConfig
from motet.core.errors import ConfigError
from motet.service.errors import Refusal
from motet.service.http.provider import Pending, Provider
from motet.service.http.sign_in import person_of

KEY, OTHER = (rsa.generate_private_key(65537, 2048) for _ in range(2))
PUBLIC = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class Documents:
    """A server of a provider's documents, which a test changes as it likes."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.form: dict[str, list[str]] = {}
        self.authorization: str | None = None
        documents = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                documents.asked[self.path] += 1
                body = documents.answers.get(self.path, b"?")
                self.send_response(400 if b'"error"' in body else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                documents.form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                documents.authorization = self.headers["Authorization"]
                self.do_GET()

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        about = {"issuer": self.url, "authorization_endpoint": f"{self.url}/page", "token_endpoint": f"{self.url}/token",
                 "jwks_uri": f"{self.url}/keys", "device_authorization_endpoint": f"{self.url}/device"}  # fmt: skip
        self.about: dict[str, Any] = about
        public = json.loads(RSAAlgorithm.to_jwk(KEY.public_key()))
        self.answers = {
            "/.well-known/openid-configuration": json.dumps(about).encode(),
            "/keys": json.dumps({"keys": [{**public, "kid": "one", "use": "sig"}, {"kty": "odd"}]}).encode(),
        }

    def token(self, key: Any = KEY, algorithm: str = "RS256", kid: str | None = "one", **changed: Any) -> str:
        """An ID token that is good but for what is changed; a claim of None is left out."""
        now = int(time.time())
        claims = {"iss": self.url, "aud": "motet", "sub": "7", "iat": now, "exp": now + 600, "nonce": "n", **changed}
        claims = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(claims, key, algorithm, {} if kid is None else {"kid": kid})

    def gives(self, token: str) -> None:
        """Answer codes with this ID token."""
        self.answers["/token"] = json.dumps({"id_token": token, "access_token": "a"}).encode()


@pytest.fixture
def documents() -> Iterator[Documents]:
    found = Documents()
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        found.server.server_close()
        thread.join()


def config(documents: Documents, **fields: Any) -> OidcConfig:
    tree = {"issuer": documents.url, "client_id": "motet", "tenant": "us", "roles": {"*": "reader"}, **fields}
    return OidcConfig.model_validate(tree)


def claims(documents: Documents) -> Any:
    """What comes of a code."""
    provider = Provider(config(documents), "")
    return asyncio.run(provider.claims_of_code("code", "http://127.0.0.1/login/callback", "verifier", "n"))


def test_a_good_token_is_taken(documents: Documents) -> None:
    documents.gives(documents.token(aud=["motet", "another"], azp="motet"))
    assert claims(documents)["sub"] == "7"


@pytest.mark.parametrize(
    ("methods", "secret", "authorization", "posted"),
    [
        (None, "a b:%", "Basic bW90ZXQ6YStiJTNBJTI1", None),  # motet:a+b%3A%25
        (["client_secret_post", "client_secret_basic"], "s", "Basic bW90ZXQ6cw==", None),
        (["client_secret_post"], "s", None, ["s"]),
        (["none"], "", None, None),
    ],
)
def test_the_client_proves_itself_as_the_provider_asks(
    documents: Documents, methods: list[str] | None, secret: str, authorization: str | None, posted: list[str] | None
) -> None:
    about = documents.about | ({} if methods is None else {"token_endpoint_auth_methods_supported": methods})
    documents.answers["/.well-known/openid-configuration"] = json.dumps(about).encode()
    documents.gives(documents.token())
    asyncio.run(Provider(config(documents), secret).claims_of_code("c", "http://127.0.0.1/", "v", "n"))
    assert (documents.authorization, documents.form.get("client_secret")) == (authorization, posted)
    assert {name: documents.form[name] for name in ("code", "code_verifier", "client_id")} == {
        "code": ["c"], "code_verifier": ["v"], "client_id": ["motet"],
    }  # fmt: skip


def unsigned(documents: Documents) -> str:
    return documents.token(key=None, algorithm="none")


def signed_with_the_public_key(documents: Documents) -> str:
    """What a verifier takes that lets the token choose the algorithm."""
    head, body, _ = documents.token().split(".")
    head = jwt.utils.base64url_encode(b'{"alg":"HS256","kid":"one"}').decode()
    return (
        f"{head}.{body}."
        + jwt.utils.base64url_encode(
            jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(f"{head}.{body}".encode(), PUBLIC)
        ).decode()
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda one: one.token(iss="https://evil.example"), "issuer", id="another issuer"),
        pytest.param(lambda one: one.token(aud="another"), "udience", id="another audience"),
        pytest.param(
            lambda one: one.token(aud=["motet", "another"], azp="another"), "for another client", id="another client"
        ),
        pytest.param(lambda one: one.token(exp=int(time.time()) - 120), "expired", id="expired"),
        pytest.param(lambda one: one.token(iat=int(time.time()) + 600), "not yet valid", id="not yet valid"),
        pytest.param(lambda one: one.token(exp=None), "exp", id="no end"),
        pytest.param(lambda one: one.token(sub=None), "sub", id="no subject"),
        pytest.param(lambda one: one.token(nonce="m"), "not for this sign-in", id="another nonce"),
        pytest.param(lambda one: one.token(nonce=None), "not for this sign-in", id="no nonce"),
        pytest.param(lambda one: one.token(OTHER), "ignature", id="another key"),
        pytest.param(lambda one: one.token(kid="two"), "does not publish the key", id="unknown key"),
        pytest.param(lambda one: one.token()[:-8] + "AAAAAAAA", "ignature", id="changed signature"),
        pytest.param(lambda one: "no token", "not valid", id="no token"),
        pytest.param(unsigned, "alg value", id="unsigned"),
        pytest.param(signed_with_the_public_key, "alg value", id="signed with the public key"),
    ],
)
def test_a_token_that_is_not_for_this_sign_in_is_refused(
    documents: Documents, make: Callable[[Documents], str], words: str
) -> None:
    documents.gives(make(documents))
    with pytest.raises(Refusal, match=words) as refused:
        claims(documents)
    assert refused.value.status == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/.well-known/openid-configuration", b"<html>"),
        ("/.well-known/openid-configuration", b"[]"),
        ("/.well-known/openid-configuration", b'{"issuer": "https://evil.example"}'),
        ("/.well-known/openid-configuration", b'{"a": "' + b"a" * 2**21 + b'"}'),
        ("/keys", b'{"keys": []}'),
        ("/keys", b'{"keys": 7}'),
        ("/token", b'{"access_token": "a"}'),
        ("/token", b"x" * 2**21),
        ("/token", b"[" * 10**5),
    ],
)
def test_a_provider_that_answers_nonsense_is_an_outage(documents: Documents, path: str, body: bytes) -> None:
    documents.gives(documents.token())
    documents.answers[path] = body
    with pytest.raises(Refusal, match="cannot be used now") as refused:
        claims(documents)
    assert refused.value.status == 503


def test_another_issuer_and_plain_http_elsewhere_are_refused(documents: Documents) -> None:
    documents.gives(documents.token())
    for name, value in (("issuer", f"{documents.url}/"), ("token_endpoint", "http://example.org/token")):
        documents.answers["/.well-known/openid-configuration"] = json.dumps({**documents.about, name: value}).encode()
        with pytest.raises(Refusal, match="cannot be used now"):
            claims(documents)


def test_documents_are_kept_and_asked_for_again_within_limits(documents: Documents) -> None:
    now = [0.0]
    provider = Provider(config(documents), "", lambda: now[0])

    async def sign_ins(number: int) -> list[Any]:
        asking = [provider.claims_of_code("c", "http://127.0.0.1/", "v", "n") for _ in range(number)]
        return [*await asyncio.gather(*asking, return_exceptions=True)]

    async def story() -> None:
        documents.gives(documents.token())
        assert all("sub" in one for one in await sign_ins(20))
        assert (documents.asked["/keys"], documents.asked["/.well-known/openid-configuration"]) == (1, 1)
        documents.gives(documents.token(OTHER, kid="two"))  # a key that nobody knows
        now[0] += 31
        assert all(isinstance(one, Refusal) for one in await sign_ins(20))
        assert documents.asked["/keys"] == 2
        public = json.loads(RSAAlgorithm.to_jwk(OTHER.public_key()))
        documents.answers["/keys"] = json.dumps({"keys": [{**public, "kid": "two"}]}).encode()
        assert all(isinstance(one, Refusal) for one in await sign_ins(1))  # asked for a moment ago
        now[0] += 31
        assert "sub" in (await sign_ins(1))[0]  # the provider has changed its key
        documents.answers["/keys"] = b"?"
        now[0] += 7200
        assert "sub" in (await sign_ins(1))[0]  # those that are known do for an outage
        assert documents.asked["/keys"] == 4

    asyncio.run(story())


def test_errors_of_a_provider_are_plain(documents: Documents) -> None:
    for error, words in (
        ("invalid_grant", r"\(invalid_grant\)"),
        ("<b>\n", "an unknown error"),
        (7, "an unknown error"),
    ):
        documents.answers["/token"] = json.dumps({"error": error, "error_description": "<b>"}).encode()
        with pytest.raises(Refusal, match=words) as refused:
            claims(documents)
        assert "<b>" not in refused.value.message


def test_a_device_sign_in_waits_as_the_provider_says(documents: Documents) -> None:
    provider = Provider(config(documents), "")

    async def story() -> None:
        for error, wait in (("authorization_pending", 5.0), ("slow_down", 10.0)):
            documents.answers["/token"] = json.dumps({"error": error}).encode()
            assert await provider.claims_of_device("d", 5.0) == Pending(wait)
        documents.answers["/token"] = b'{"error": "access_denied"}'
        with pytest.raises(Refusal, match="access_denied"):
            await provider.claims_of_device("d", 5.0)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("fields", "groups", "role"),
    [
        ({"roles": {"a": "reader", "b": "admin", "c": "member"}}, ["a", "b", "c"], "admin"),
        ({"roles": {"a": "reader", "*": "member"}}, ["x"], "member"),
        ({"roles": {"a": "tenant-admin"}}, "a", "tenant-admin"),
        ({"roles": {"a": "reader"}}, {"a": "reader"}, None),
        ({"roles": {"a": "reader"}}, None, None),
        ({"roles": {"a": "reader"}}, [["a"], 7], None),
    ],
)
def test_a_person_has_the_highest_role_of_their_groups(
    documents: Documents, fields: Any, groups: Any, role: str | None
) -> None:
    claims = {"iss": "i", "sub": "s", "groups": groups, "email": "a@example.org\n"}
    if role is None:
        with pytest.raises(Refusal, match="none of your groups"):
            person_of(config(documents, **fields), claims)
    else:
        person = person_of(config(documents, **fields), claims)
        assert (person.role, person.tenant, person.name) == (role, "us", "a@example.org")


@pytest.mark.parametrize("tenant", [None, "", "a b", "-x", "x" * 101, 7, ["a", "b"], []])
def test_a_claim_that_names_no_tenant_is_refused(documents: Documents, tenant: Any) -> None:
    asked = config(documents, tenant="", tenant_claim="team")
    assert person_of(asked, {"iss": "i", "sub": "s", "team": ["a"]}).tenant == "a"
    with pytest.raises(Refusal, match="has no tenant here"):
        person_of(asked, {"iss": "i", "sub": "s", "team": tenant})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{issuer: http://idp.example.org, client_id: m, tenant: t, roles: {a: member}}", "must begin with https://"),
        ("{issuer: https://idp.example.org, client_id: m, roles: {a: member}}", "`tenant_claim`"),
        (
            "{issuer: https://idp.example.org, client_id: m, tenant: t, tenant_claim: c, roles: {a: member}}",
            "give either",
        ),
        ("{issuer: https://idp.example.org, client_id: m, tenant: t, roles: {}}", "roles"),
        ("{issuer: https://idp.example.org, client_id: m, tenant: t, roles: {a: owner}}", "roles"),
        ("{issuer: https://idp.example.org, client_id: m, tenant: t, roles: {a: member}, scopes: [email]}", "`openid`"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(tmp_path: Any, text: str, words: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"oidc: {text}\n")
    with pytest.raises(ConfigError, match=words):
        load_service(file)
