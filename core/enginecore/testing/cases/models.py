from enginecore.testing.case import Case


def cases() -> list[Case]:
    return []
