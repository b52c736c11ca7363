"""Property tests here judge results, not speed: a loaded machine must not fail them."""

from hypothesis import settings

settings.register_profile("farflung", deadline=None)
settings.load_profile("farflung")
