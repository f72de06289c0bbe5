"""The service: jobs of many tenants over one base or several, asked for and watched over HTTP."""
