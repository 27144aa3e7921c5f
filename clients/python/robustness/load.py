"""A small, fast client: one kept-alive connection, AWS JSON by hand."""

import http.client
import json


class Connection:
    def __init__(self, server, timeout=30):
        self.server, self.timeout = server, timeout
        self.http = None

    def call(self, action, **parameters):
        """The answer; OSError or HTTPException when the connection broke and the outcome is unknown."""
        if self.http is None:
            self.http = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=self.timeout)
        headers = {"Content-Type": "application/x-amz-json-1.0", "X-Amz-Target": f"AmazonSQS.{action}"}
        try:
            self.http.request("POST", "/", json.dumps(parameters), headers)
            response = self.http.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        assert response.status == 200, (response.status, body)
        return json.loads(body)

    def close(self):
        if self.http is not None:
            self.http.close()
            self.http = None


def create(server, name, **attributes):
    attributes = {key: str(value) for key, value in attributes.items()}
    connection = Connection(server)
    try:
        return connection.call("CreateQueue", QueueName=name, Attributes=attributes)["QueueUrl"]
    finally:
        connection.close()
