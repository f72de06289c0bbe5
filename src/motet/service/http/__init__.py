"""What every route needs: who asks, how much and how often, and how it is refused."""
