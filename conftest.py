"""Prepares every run, of tests and of lectures."""

from tests.run_guard import pytest_configure as pytest_configure
