"""One file per dataset; importing the package enters them all into the catalogue."""

from cflat._registry import import_modules

import_modules(__name__, __path__)
