"""The SQL store: records, tables, migrations, statements, views, export."""
