"""``python -m server.settings`` prints the page docs/settings.md."""

from server.settings.settings import settings_table

if __name__ == "__main__":
    print(settings_table(), end="")
