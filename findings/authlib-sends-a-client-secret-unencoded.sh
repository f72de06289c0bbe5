#!/usr/bin/env bash
# authlib 1.9.10, httpx2 2.16.2, Python 3.11 (2026-11-30).
#
# RFC 6749, section 2.3.1: in HTTP Basic, client id and secret are form-encoded first. A token endpoint that keeps to it
# decodes them. AsyncOAuth2Client sends them as they are, so a secret with `+` or `%` is another one there: `a+b%25` is read
# as `a b%`, and a right secret is refused as invalid_client. Encoding the secret before it is given to the client helps.
# Seen: "as it is: invalid_client; encoded by hand: a token".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "authlib==1.9.10" "httpx2==2.16.2"
cat > ask.py <<'PY'
import asyncio, base64
from urllib.parse import quote_plus, unquote_plus

import httpx2
from authlib.integrations.base_client import OAuthError
from authlib.integrations.httpx_client import AsyncOAuth2Client

SECRET = "a+b%25"


def token_endpoint(request: httpx2.Request) -> httpx2.Response:
    name, _, secret = base64.b64decode(request.headers["authorization"].split()[1]).decode().partition(":")
    if (unquote_plus(name), unquote_plus(secret)) != ("app", SECRET):
        return httpx2.Response(401, json={"error": "invalid_client"})
    return httpx2.Response(200, json={"access_token": "t", "token_type": "bearer"})


async def ask(secret: str) -> str:
    async with AsyncOAuth2Client("app", secret, transport=httpx2.MockTransport(token_endpoint)) as client:
        try:
            await client.fetch_token("http://127.0.0.1/token", grant_type="client_credentials")
        except OAuthError as error:
            return error.error
        return "a token"


print(f"as it is: {asyncio.run(ask(SECRET))}; encoded by hand: {asyncio.run(ask(quote_plus(SECRET)))}")
PY
seen=$(env/bin/python ask.py)
echo "$seen"
[ "$seen" = "as it is: invalid_client; encoded by hand: a token" ]
