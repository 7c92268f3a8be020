"""The page of `dsplan ui` as a Space of the Hugging Face Hub: this file is its `app.py`, and `dsplan[ui]` its
`requirements.txt`. A Space of the SDK Gradio on a CPU is enough."""

from dsplan.ui.server import ServerOptions, serve

if __name__ == "__main__":
    serve(ServerOptions(host="0.0.0.0"))
