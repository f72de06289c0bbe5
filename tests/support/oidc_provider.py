"""An OpenID Connect provider of its own process: Django with django-oauth-toolkit, which asks for PKCE, consent and a password.

    python tests/support/oidc_provider.py DIRECTORY PORT CALLBACK

People are in `PEOPLE`, their password is `PASSWORD`. The client `thin` gets ID tokens that lack groups and team, as some
providers send them, and the answer `slow_down` to its first two questions of a device flow. The toolkit does not announce its
device flow, and gives no ID token there; the classes below add both.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

PASSWORD = "correct horse"
ABROAD = "https://motet.example.org"
"""A service that the provider knows too."""
SECRET = "a secret / with + signs"
PEOPLE: dict[str, tuple[str, list[str]]] = {
    "ada": ("team-a", ["ml-admins", "everyone"]),
    "tina": ("team-a", ["ml-leads"]),
    "mia": ("team-a", ["ml", "ml-readers"]),
    "rob": ("team-a", ["ml-readers"]),
    "carol": ("team-a", ["accounting"]),
    "eve": ("team a; drop", ["ml"]),
}
"""Team and groups by name."""


def main(directory: Path, port: int, callback: str) -> None:
    """Serve until ended."""
    import logging

    import django
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from django.conf import settings

    key = rsa.generate_private_key(65537, 2048)
    here = __name__
    settings.configure(
        SECRET_KEY="of a test", ALLOWED_HOSTS=["*"], ROOT_URLCONF=here, USE_TZ=True, LOGIN_URL="/sign-in/",
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(directory / "provider.db")}},
        DEFAULT_AUTO_FIELD="django.db.models.AutoField", SESSION_COOKIE_NAME="provider", CSRF_COOKIE_NAME="provider-csrf",
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions",
                        "django.contrib.staticfiles", "oauth2_provider"],
        STATIC_URL="static/", LOGGING_CONFIG=None, PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware", "django.middleware.csrf.CsrfViewMiddleware",
                    "django.contrib.auth.middleware.AuthenticationMiddleware"],
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
        OAUTH2_PROVIDER={
            "OIDC_ENABLED": True, "PKCE_REQUIRED": True, "OIDC_ISS_ENDPOINT": f"http://127.0.0.1:{port}",
            "OIDC_RSA_PRIVATE_KEY": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
            "SCOPES": {"openid": "openid", "profile": "profile", "email": "email"},
            "OAUTH2_VALIDATOR_CLASS": f"{here}.Validator", "OIDC_SERVER_CLASS": f"{here}.Server",
            "OAUTH_DEVICE_VERIFICATION_URI": f"http://127.0.0.1:{port}/device/", "DEVICE_FLOW_INTERVAL": 1,
            "REQUEST_APPROVAL_PROMPT": "auto",
        },
    )  # fmt: skip
    logging.basicConfig(level=logging.WARNING)
    django.setup()
    from django.contrib.auth.models import Group, User
    from django.core.management import call_command
    from oauth2_provider.models import Application

    call_command("migrate", verbosity=0)
    for name, (team, groups) in PEOPLE.items():
        user = User.objects.create_user(name, f"{name}@example.org", PASSWORD, last_name=team)
        user.groups.set(Group.objects.get_or_create(name=group)[0] for group in groups)
    for client in ("motet", "thin"):
        Application.objects.create(
            client_id=client, client_secret=SECRET, client_type="confidential", algorithm="RS256",
            redirect_uris=f"{callback} {ABROAD}/login/callback", authorization_grant_type="authorization-code",
            skip_authorization=client == "thin",
        )  # fmt: skip
    define()
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.servers.basehttp import WSGIServer, run
    from django.core.wsgi import get_wsgi_application

    run("127.0.0.1", port, StaticFilesHandler(get_wsgi_application()), threading=True, server_cls=WSGIServer)


urlpatterns: list[Any] = []
"""Filled by `define`: the toolkit is imported once Django is set up."""


def define() -> None:
    """The pages, and what the toolkit does not do by itself."""
    from django.contrib.auth.views import LoginView
    from django.http import JsonResponse
    from django.template import engines
    from django.urls import include, path
    from oauth2_provider.oauth2_validators import OAuth2Validator
    from oauth2_provider.views import ConnectDiscoveryInfoView, TokenView
    from oauthlib.oauth2 import DeviceCodeGrant
    from oauthlib.openid import Server as OpenIdServer

    device = "urn:ietf:params:oauth:grant-type:device_code"

    class Validator(OAuth2Validator):
        oidc_claim_scope = None

        def get_additional_claims(self, request: Any) -> dict[str, Any]:
            user = request.user
            groups = [group.name for group in user.groups.all()]
            return {"preferred_username": user.username, "groups": groups, "team": user.last_name}

        def get_id_token_dictionary(self, token: Any, token_handler: Any, request: Any) -> Any:
            claims, expires = super().get_id_token_dictionary(token, token_handler, request)
            if request.client.client_id == "thin":
                claims = {name: value for name, value in claims.items() if name not in ("groups", "team")}
            return claims, expires

        def validate_grant_type(self, client_id: Any, grant_type: str, *more: Any, **named: Any) -> bool:
            return grant_type in ("authorization_code", device)

    class Device(DeviceCodeGrant):
        def create_token_response(self, request: Any, token_handler: Any) -> Any:
            headers, body, status = super().create_token_response(request, token_handler)
            if status == 200:
                claims = {"aud": request.client_id, "iat": int(time.time())}
                token = json.loads(body)
                token["id_token"] = self.request_validator.finalize_id_token(claims, token, token_handler, request)
                body = json.dumps(token)
            return headers, body, status

    class Server(OpenIdServer):
        def __init__(self, validator: Any, *more: Any, **named: Any) -> None:
            super().__init__(validator, *more, **named)
            own = Device(validator)
            own.custom_validators = self.device_code_grant.custom_validators
            self._grant_types[device] = own

    class Token(TokenView):
        asked: Counter[tuple[str, str]] = Counter()

        def post(self, request: Any, *more: Any, **named: Any) -> Any:
            who = (request.POST.get("client_id"), request.POST.get("grant_type"))
            self.asked[who] += 1
            if who == ("thin", device) and self.asked[who] <= 2:
                return JsonResponse({"error": "slow_down"}, status=400)
            return super().post(request, *more, **named)

    class Discovery(ConnectDiscoveryInfoView):
        def get(self, request: Any, *more: Any, **named: Any) -> Any:
            about = json.loads(super().get(request, *more, **named).content)
            if not os.environ.get("NO_DEVICE"):
                about["device_authorization_endpoint"] = request.build_absolute_uri("/device-authorization/")
            return JsonResponse(about)

    class SignIn(LoginView):
        def render_to_response(self, context: Any, **named: Any) -> Any:
            from django.http import HttpResponse

            page = engines["django"].from_string(
                "<form method=post>{% csrf_token %}{{ form }}<button>Enter</button></form>"
            )
            return HttpResponse(page.render(context, self.request))

    globals().update(Validator=Validator, Server=Server)
    urlpatterns.extend(
        [
            path(".well-known/openid-configuration", Discovery.as_view()),
            path("sign-in/", SignIn.as_view()),
            path("token/", Token.as_view()),
            path("", include("oauth2_provider.urls")),
        ]
    )


if __name__ == "__main__":
    sys.modules["oidc_provider"] = sys.modules["__main__"]
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
