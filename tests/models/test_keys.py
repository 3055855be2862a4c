"""The page of settings says what is read."""

import pathlib

from mla_attn.models import keys
from mla_attn.models.settings import Setting


def test_the_page_shows_the_tables():
    page = (pathlib.Path(keys.__file__).parent / "README.md").read_text()
    shown = page.partition("<!-- keys -->\n\n")[2].partition("\n\n<!-- end of keys -->")[0]
    assert shown == keys.settings_page(), "python -m mla_attn.models.keys prints what belongs there"


def test_every_setting_is_on_the_page():
    tables = [table for table in vars(keys).values() if isinstance(table, dict)]
    settings = {id(each): name for table in tables for name, each in table.items() if isinstance(each, Setting)}
    on_page = {id(setting) for table in keys._PAGE.values() for setting in table.values()}
    assert len(settings) > 40 and [name for key, name in settings.items() if key not in on_page] == []
