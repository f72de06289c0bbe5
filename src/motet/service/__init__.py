"""The service: jobs of many tenants over one or several bases, submitted and watched over HTTP."""
