"""Writes an order and its event in one transaction, with SQLAlchemy.

    pip install sqlalchemy 'psycopg[binary]'
    python3 order_sqlalchemy.py postgres://localhost/shop 7 1999
"""

import sys

from sqlalchemy import BigInteger, create_engine, func, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.sql.expression import bindparam


class Base(DeclarativeBase):
    """The models."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    cents: Mapped[int] = mapped_column(BigInteger)


def place(session, order, cents):
    """Places an order in the session's transaction; returns the id of its event."""
    session.add(Order(id=order, cents=cents))
    session.flush()
    body = bindparam(None, {"order": order, "cents": cents}, JSONB)
    return str(session.scalar(select(func.hapax.enqueue("orders.placed", f"order-{order}", body))))


if __name__ == "__main__":
    url, order, cents = sys.argv[1:]
    engine = create_engine(url.replace("postgres://", "postgresql+psycopg://", 1))
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        print(place(session, int(order), int(cents)))
