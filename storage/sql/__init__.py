"""The database: connections, sessions, schema, views, encoding."""
