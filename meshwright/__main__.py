"""`python -m meshwright` is the command `meshwright`."""

from meshwright.cli.main import main

if __name__ == "__main__":
    main()
