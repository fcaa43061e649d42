"""`kvrelay up --on ray`: Ray places and watches the services of a cluster. No token and no KV passes through Ray."""
