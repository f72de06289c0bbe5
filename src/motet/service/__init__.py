"""The service: jobs of many tenants over one base, asked for and watched over HTTP."""
