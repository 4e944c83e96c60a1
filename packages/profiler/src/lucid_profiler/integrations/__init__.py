"""What speaks to lucid for other people's trainers; each module needs the trainer that it is named after."""
